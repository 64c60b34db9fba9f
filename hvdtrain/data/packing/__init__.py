"""`data pack` and `data inspect`: writing sharded TFRecords, and finding out what data hold.

Start with `pack.py` and `inspection.py`. Works on `data/files` and `data/sources`; nothing in training imports it.
"""
