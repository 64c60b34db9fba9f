"""A run from its configuration: its folder and files, resuming, and what each verb does on every rank.

Start with `run.py`. May import everything below it, from `training` on; only `cli` and `bench` import it.
"""
