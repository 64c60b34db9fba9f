"""Keras layers and model transformations: batch normalization, recomputation, experts, embeddings.

Start with `sync_batch_norm.py`; `experts.py` has a mixture of experts, `embedding.py` sharded embedding tables. May
import `backends` (for its collectives), `runtime` and `config`.
"""
