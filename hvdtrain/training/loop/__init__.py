"""The loop over steps: when to log, evaluate, save and stop; start with `loop.py`.

Everything between two steps is a hook. The loop is independent of how a step is computed.
"""
