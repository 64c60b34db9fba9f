"""Steps that are written for the whole batch, run on each rank's rows, with the values of one process.

`kinds` says how a rank holds a tensor, `partition` converts between these ways, `table` has the rule of each operation
(`rules`, `reshaping`, `slicing`, `draws`), `tracing` applies them as a step is traced. Start with `partition.py`. May
import `backends` and below; `gradients`, `training` and the public API import it.
"""
