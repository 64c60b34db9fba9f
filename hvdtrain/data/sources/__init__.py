"""Data sources, a file for each kind of data, with the functions that `--data` names in `data/registry.py`.

`keras_datasets.py` is a short one to start with.
"""
