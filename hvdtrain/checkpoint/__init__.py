"""Checkpoints of the training state: each rank writes the slices it owns, and the checkpoint appears as a whole or not.

May import `state` and below. Start with `checkpointer.py` (the slices each rank owns), then `pending.py` (a checkpoint
that is being written), `tensor_files.py` (a rank's safetensors file) and `commit.py` (the index and the rename);
`restore.py` is the way back.
"""
