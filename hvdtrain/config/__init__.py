"""Options as nested frozen dataclasses; start with `run.py`, the whole configuration.

One file per room that it configures. An option is declared and validated once, here: its field name is the command-line
flag and the key in `config.yaml`. Imports neither TensorFlow nor any other room.
"""
