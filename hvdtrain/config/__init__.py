"""Every option, as nested frozen dataclasses; imports no TensorFlow."""
