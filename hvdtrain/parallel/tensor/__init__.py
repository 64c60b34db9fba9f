"""Tensor parallelism: each rank holds shards of a layer's variables.

Start with `parallelize.py`. `rules.py` maps variables to layouts, `building.py` creates sharded variables, `layers/`
adds collectives to sharded layers, and `flow/` propagates sharded activations from layer to layer.

Column- and row-parallel layers and the vocabulary-parallel embedding and cross-entropy follow Shoeybi et al. 2019,
"Megatron-LM" (arXiv:1909.08053); sequence parallelism follows Korthikanti et al. 2022 (arXiv:2205.05198).
"""
