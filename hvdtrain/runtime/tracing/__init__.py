"""One trace of all ranks: what each does, Horovod's exchange, and TensorFlow's operations, on one clock.

`trace.py` records on each rank; `merge.py` makes one file of it, and tells how much of the exchange is overlapped.
"""
