"""Static analysis of users' Horovod scripts for `doctor --script`: what they use, and what has to change.

Start with `report.py`. Scripts are parsed, never run, and nothing of TensorFlow, Keras or Horovod is imported: what
these packages offer is read from their sources. `files.py` finds the scripts and `source.py` decodes them; `program.py`
ties them together by their imports; `scopes.py` says what a name stands for; `imports.py`, `horovod_uses.py` and
`keras_uses.py` judge; `rewrite.py` changes imports.
"""
