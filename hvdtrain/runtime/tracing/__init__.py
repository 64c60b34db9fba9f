"""One trace of all ranks: what each does, Horovod's exchange, and TensorFlow's operations, on one clock.

`trace.py` records on each rank, `merge.py` makes one file of what the ranks have recorded,
`overlap.py` reads from it how much of the exchange lies behind the arithmetic.
"""
