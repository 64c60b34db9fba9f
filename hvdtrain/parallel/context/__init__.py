"""Context parallelism: each rank of a group holds a slice of every sequence, and all of the model.

Start with `split.py`. `cuts.py` cuts sequences where they enter the model, `attention.py` lets attention see all of a
sequence, `flow.py` follows the slices from layer to layer, and `positions.py` gives losses and metrics their slices.
Stages of a pipeline pass the slices on: `parallel/pipeline/sequences.py` knows which tensors are some.

Attention exchanges positions for heads, as in Jacobs et al. 2023, "DeepSpeed Ulysses" (arXiv:2309.14509).
"""
