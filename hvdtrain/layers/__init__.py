"""Keras layers and model transformations: synchronized and fused batch normalization, recomputation.

Start with `sync_batch_norm.py`. May import `backends` (layers exchange statistics through its collectives), `runtime`
and `config`.
"""
