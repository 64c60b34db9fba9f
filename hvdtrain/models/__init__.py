"""Model families, by name; start with `registry.py`, then `family.py`.

One folder per family, each with a `FAMILY`: a builder that returns a built Keras model, with its loss and metrics.
Models are plain Keras and know nothing of Horovod. May import `config`.
"""
