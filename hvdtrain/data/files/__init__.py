"""File formats, and random access to the records in them: folders of images, tar files, TFRecords, packed folders.

Start with `blobs.py`. Nothing here knows about batches or training; sources are built on top of it.
"""
