"""Pipeline parallelism: stages of layers on different ranks, fed with microbatches.

Start with `schedule.py`: the order of passes on each rank, as plain lists. `cut.py` partitions the model, `stage.py` is
the model that one rank holds, `exchange.py` sends tensors between stages.
"""
