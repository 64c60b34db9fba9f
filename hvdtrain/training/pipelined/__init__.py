"""Training of a pipeline's stages (`hvdtrain.parallel.pipeline`).

Start with `forward_backward.py`, the counterpart of `step/forward_backward.py`; update rules are unchanged.
"""
