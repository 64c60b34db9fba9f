"""Training state: every tensor of a run by structural path, with its shard of the full tensor.

Start with `train_state.py`. `variables.py` converts Keras variables; everything else uses tf.Variables.
"""
