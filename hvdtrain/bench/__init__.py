"""The engine of `python -m hvdtrain bench` and of the scripts in benchmarks/: launching, results, reports.

`engine.py` launches jobs in turn, `results.py` is the schema of results.json, `report.py` renders it; `suite.py`,
`collectives.py`, `layouts.py` and `autotune.py` define what is launched, `plain.py`, `trained.py` and `callers.py` what
is timed on the ranks. The process that launches needs no TensorFlow. May import every room but `cli` and `horovod`, and
is the one room beside `runtime` and `horovod` that calls Horovod and MPI directly: hvdtrain is compared with them.
"""
