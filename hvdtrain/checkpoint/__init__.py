"""Checkpoints of the training state that appear whole or not at all; start with `checkpointer.py`.

May import `state`; knows nothing of training.
"""
