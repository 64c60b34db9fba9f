"""Evaluation and prediction over all replicas, each sample counted once; start with `evaluate.py`."""
