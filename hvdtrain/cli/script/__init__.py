"""Static analysis of a user's Horovod script for `doctor --script`: what it calls, and what has to change.

Start with `report.py`. Scripts are parsed, never run, and nothing of TensorFlow, Keras or Horovod is imported.
"""
