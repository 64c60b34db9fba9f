"""Samples without targets, as a trained model is to predict them; start with `read.py`."""
