"""Recipes: functions that return a full `Config`; start with `digits.py`.

`registry.py` is the table of names; a recipe's docstring is its line in `python -m hvdtrain recipes`. Imports `config`
only.
"""
