"""The checks of `doctor`: is everything here that distributed training needs? Each check tries the real thing.

Start with `diagnose.py`, which lists them; `check.py` is what a check returns.
"""
