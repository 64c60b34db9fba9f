"""The training state: every tensor of a run under a structural path, with its place in the whole.

Start with `train_state.py`. `variables.py` is the door at which Keras variables stop: below it all are tf.Variables.
"""
