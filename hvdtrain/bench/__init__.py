"""The engine of `python -m hvdtrain bench`: what is measured, how it is launched, and the reports.

`plan.py` decides what runs and in which order, `suite.py` and `collectives.py` launch it, `results.py` is the schema of
results.json, `report.py` renders it; start with `suite.py`. Most files import no TensorFlow, since the process that
launches ranks needs none. May import every room but `cli` and `horovod`, and is the one room beside `runtime` and
`horovod` that calls Horovod and MPI directly: they are what hvdtrain is compared with.
"""
