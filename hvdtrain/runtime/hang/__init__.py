"""Hang detection: what each rank does, whether it makes progress, and when a job that stands still is ended.

Start with `watch.py`, which puts the pieces together on the watchdog's thread. Imports neither TensorFlow nor Horovod.
"""
