"""Reduction, compression and accumulation of gradients; public tape, optimizer and differentiable collectives.

Start with `reduction.py`; `gradient_exchange.py` gives it Horovod's options. May import `state`, `optim` and what lies
below; `training` and `horovod` import it.
"""
