"""Optimizers by name, learning-rate schedules, clipping, loss scaling and weight averaging.

Start with `optimizers.py`. Everything acts on one replica's reduced gradients, without communication. May import
`config`.
"""
