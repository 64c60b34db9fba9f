"""Files and what is in them, read by place."""
