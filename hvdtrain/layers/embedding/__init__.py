"""Embedding tables that the ranks along the axis `ep` have divided among them.

Start with `sharded.py`, the layer; `lookups.py` looks up the rows of several tables in one exchange. May import
`runtime`, `backends` and `config`.
"""
