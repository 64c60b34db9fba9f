"""Data sources, one file for each kind of data; each has a `load()` that `--data` names in `data/registry.py`.

`synthetic.py` is the shortest one to start with. The files without a `load()` hold what several sources share.
"""
