"""Losses and metrics, with the outputs, targets and weights they use.

Start with `losses.py`. Imports nothing from `step` or `loop`.
"""
