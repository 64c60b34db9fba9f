"""Distribution engines behind one small protocol; start with `protocol.py`.

`horovod.py` is the product, `single.py` the reference, the others are for comparison. May import `runtime` and `config`
only.
"""
