"""ZeRO: shard optimizer state, gradients and parameters (Rajbhandari et al. 2020, arXiv:1910.02054).

Stage 1 shards the optimizer state, stage 2 the gradients too, and stage 3 the parameters. Each large variable is
flattened in row-major order and split into one shard per replica. Start with `stage1.py`; each stage builds on the
previous one.
"""
