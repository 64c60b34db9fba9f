"""Calls of sharded layers, by kind; start with `sharded.py`.

A layer keeps its class, configuration and position in the model: only its `call` is replaced.
"""
