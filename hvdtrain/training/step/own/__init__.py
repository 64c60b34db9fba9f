"""Models with a `train_step` of their own: Keras' semantics, over all replicas; start with `train_step.py`."""
