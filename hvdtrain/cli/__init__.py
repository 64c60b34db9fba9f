"""The verbs of `python -m hvdtrain`, one file each; start with `main.py`, whose table names them.

A verb parses its command line, then calls `runs`, `bench` or `runtime.diagnosis`; `launch.py` and `local.py` hold what
verbs on several ranks and on one have in common. No file imports TensorFlow at its top, so that `--help` is fast.
"""
