"""ZeRO: the ranks share out what each of them would otherwise hold whole (Rajbhandari et al. 2020, arXiv:1910.02054).

Stage 1 divides the optimizer's slots, stage 2 the gradients too, and stage 3 the parameters. Each large variable is
laid out flat, in row-major order, and cut into one slice per replica. Start with `stage1.py`; each stage builds on the
one before it.
"""
