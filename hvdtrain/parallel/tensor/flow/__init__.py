"""Where sharded activations go in a model: from the layers that give them to those that take them.

Start with `check.py`, which traces a model and follows each activation through TensorFlow's graph; `operations.py` says
what each operation does with a sharded dim, `moves.py` those that move elements alone.
"""
