"""Models with their own `train_step`: Keras' semantics, over all replicas; start with `train_step.py`."""
