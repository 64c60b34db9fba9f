"""Options as nested frozen dataclasses; start with `run.py`, the whole configuration.

One file per room that it configures. An option is declared once, here, with its range and what it needs, excludes and
applies to (`options.py`): its field name is the command-line flag and the key in `config.yaml`. `check` compares
options with one another and with the facts of a job (`facts.py`). Imports neither TensorFlow nor any other room.
"""
