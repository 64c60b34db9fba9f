"""Context parallelism: each rank holds the full model and a shard of every sequence.

Start with `split.py`. `layers.py` shards sequences where they enter the model and lets attention see all positions (an
all-to-all between positions and heads, as in Jacobs et al. 2023, "DeepSpeed Ulysses", arXiv:2309.14509), `flow.py`
tracks shards from layer to layer, and `positions.py` gives losses and metrics their shards.
"""
