"""Observers of a run: console, metrics.jsonl, TensorBoard and plots; start with `events.py`.

`events.py` defines the records that training emits and the `Observer` that receives them; each other file is
one observer, or helps one. Observers run on the primary only and compute nothing themselves. May import `config`.
"""
