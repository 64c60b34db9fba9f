"""What training minimizes and measures: losses, metrics, and the outputs, targets and weights that belong to them.

Start with `losses.py`. Imports nothing from `step` or `loop`.
"""
