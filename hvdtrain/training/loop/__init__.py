"""The loop over steps: when to log, evaluate, save and stop; start with `loop.py`.

What happens between two steps is a hook. The loop knows nothing about how a step is computed.
"""
