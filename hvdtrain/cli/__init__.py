"""The verbs of `python -m hvdtrain`; start with `main.py`, whose table names them.

A verb parses its command line with `parser.Parser`, and `running.py` runs it on all ranks or in one process: it calls
`runs`, `bench` or `runtime.diagnosis`. No file imports TensorFlow at its top, so that `--help` is fast.
"""
