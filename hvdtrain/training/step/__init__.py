"""One optimizer step as one compiled function; start with `train_step.py`.

A step factory puts a step together; `forward_backward.py` yields local gradients, which an update rule turns into new
weights.
"""
