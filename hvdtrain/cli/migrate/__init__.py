"""Migration of Horovod scripts for `doctor --script`: read, never run, and their imports rewritten.

Start with `report.py`. `source.py` reads and writes files, `program.py` resolves the names of scripts that import one
another, `packages.py` the names of installed packages; `horovod.py` and `keras.py` judge the uses of both.
"""
