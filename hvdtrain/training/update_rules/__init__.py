"""Update rules: what happens after the backward pass. One file each; start with `all_reduce.py`.

A rule owns the exchange, the global norm, the optimizer with its slots, and tensors of its own.
"""
