"""Model families, by name; start with `registry.py`, then `family.py`.

One folder per family, each with a `FAMILY`: a builder that returns a built Keras model, with its loss and metrics.
Models are Keras models and know nothing of Horovod; `moe_transformer` has a layer of our own. May import `layers`
and `config`.
"""
