"""Update rules: everything after the backward pass. One file each; start with `all_reduce.py`.

A rule owns gradient reduction, the global norm, the optimizer with its state, and tensors of its own.
"""
