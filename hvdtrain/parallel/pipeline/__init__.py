"""Pipeline parallelism: a model's layers are cut into stages, and microbatches travel through the ranks that hold them.

Start with `schedule.py`: what each rank does in which order, as plain lists. `cut.py` decides where a model is cut,
`stage.py` is the model that one rank holds, `exchange.py` carries tensors from stage to stage.
"""
