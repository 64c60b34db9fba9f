"""What the layers that hold slices do in their call, by kind; start with `select.py`.

A layer keeps its class, its configuration and its place in the model: only its `call` is replaced.
"""
