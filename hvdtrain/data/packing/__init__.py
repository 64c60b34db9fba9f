"""`data pack`: writing sharded TFRecords; nothing in training imports it."""
