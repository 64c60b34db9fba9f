"""Batches that users bring: a tf.data.Dataset, a keras.utils.PyDataset or a generator function.

Start with `dataset_batches.py` and `python_batches.py`; `given.py` compares the data of all ranks.
"""
