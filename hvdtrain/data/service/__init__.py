"""Reading and decoding in processes of tf.data service; start with `served.py`."""
