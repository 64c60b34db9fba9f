"""What happens between the steps of a training; their order is the list in `training/run.py`.

Each is a `Callback` (`base.py`). A callback that exchanges is due after the same steps on every rank.
"""
