"""Checkpoints of the training state: each rank writes what it owns, and the whole appears at once or not at all.

May import `state` and below. Start with `checkpointer.py`: snapshot (what a rank owns), write (its file), commit (the
manifest and the name); `restore.py` is the way back.
"""
