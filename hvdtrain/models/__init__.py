"""Model families, by name; start with `registry.py`.

One file per family, each with a `FAMILY`: a builder that returns a built Keras model, with its loss and metrics. They
are plain Keras models without Horovod; `moe_transformer` and `dlrm` use layers of `layers`. May import `layers` and
`config`.
"""
