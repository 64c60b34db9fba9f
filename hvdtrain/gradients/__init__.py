"""What happens to gradients: accumulation, compression, reduction, and the public tape and optimizer over them.

Start with `reduction.py`. May import `state`, `optim` and what lies below; `training` and `horovod` import it.
"""
