"""One optimizer step as one compiled function; start with `train_step.py`.

A step factory assembles a step; `forward_backward.py` computes local gradients, which an update rule turns into new
weights.
"""
