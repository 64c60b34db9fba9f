"""Recipes: functions that return a whole `Config`, by name; start with `digits.py`.

`registry.py` is the table of names; a recipe's docstring is its line in `python -m hvdtrain recipes`. Imports `config`
only.
"""
