"""Saving, verifying and restoring the training state."""
