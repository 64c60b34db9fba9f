"""Data sources, and the pipeline that forms global batches and cuts each replica's slice; start with `pipeline.py`.

`source.py` is the Protocol of a data source, `registry.py` names the ones there are, `order.py` decides which samples
form a batch. `streams/` takes the batches that users bring. May import `backends`, `runtime`, `config`.
"""
