"""TensorFlow 1's API, `tf.compat.v1`: optimizers, the broadcast of all variables, and session hooks.

Scripts with graphs and sessions run as with plain Horovod. The exchange is this project's own: gradients are matched by
their place and not by the names of ops, which depend on what else a rank has built. Start with `optimizer.py`.
"""
