"""Propagation of sharded activations from producing to consuming layers.

Start with `check.py`, which traces a model and follows each activation through TensorFlow's graph; `operations.py` has
the propagation rule of each op.
"""
