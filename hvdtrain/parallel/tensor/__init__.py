"""Tensor parallelism: each rank of a group holds a slice of a layer's variables and computes its part of the layer.

Start with `parallelize.py`. `rules.py` says which variables are cut, `building.py` makes them as slices, `layers/`
gives the layers that hold them their collectives, and `flow/` follows sharded activations from layer to layer.

Column and row parallel layers and the vocabulary-parallel embedding and cross-entropy follow Shoeybi et al. 2019,
"Megatron-LM" (arXiv:1909.08053); sequence parallelism follows Korthikanti et al. 2022 (arXiv:2205.05198).
"""
