"""Training of a model whose layers are on several ranks: the stages of a pipeline; see `hvdtrain.parallel.pipeline`.

Start with `forward_backward.py`, which takes the place of `step/forward_backward.py`; the update rule stays.
"""
