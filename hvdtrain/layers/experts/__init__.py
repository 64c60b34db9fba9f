"""Mixture of experts: a router sends each token to one or two of many small networks.

Start with `mixture.py`, the layer. `routing.py`, `balance.py` and `dispatch.py` are its functions, each by itself and
without a mesh; `exchange.py` moves tokens between the ranks of the axis `ep`. May import `runtime` and `config`.
"""
