"""Optimizers by name, learning-rate schedules, clipping, loss scaling and weight averaging.

Start with `optimizers.py`. All of it acts on one replica's reduced gradients: nothing here exchanges anything. May
import `config`.
"""
