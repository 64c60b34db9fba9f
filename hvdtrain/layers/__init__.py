"""Keras layers and model transformations: synchronized and fused batch normalization, recomputation, experts.

Start with `sync_batch_norm.py`; `experts/` has a mixture of experts, `embedding/` tables that ranks have divided. May
import `backends` (layers exchange through its collectives), `runtime` and `config`.
"""
