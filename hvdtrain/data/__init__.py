"""Sources and the pipeline that shards them."""
