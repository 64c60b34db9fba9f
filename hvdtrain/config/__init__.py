"""Every option, as nested frozen dataclasses; start with `run.py`, which composes them.

One file per room that it configures. An option is declared and validated here, once: its field name is the command
line's flag and the key in `config.yaml`. Imports neither TensorFlow nor any other room.
"""
