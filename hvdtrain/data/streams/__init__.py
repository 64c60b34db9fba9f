"""Batches that users bring: a tf.data.Dataset, a keras.utils.PyDataset or a generator function; start with
`dataset_batches.py` and `python_batches.py`. `given.py` compares what the ranks were given.
"""
