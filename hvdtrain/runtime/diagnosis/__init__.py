"""The checks of `doctor`: is everything here that distributed training needs? Each check tries the real thing.

Start with `diagnose.py`, which lists them; `machine.py` has what a check returns, and reads facts of the machine.
"""
