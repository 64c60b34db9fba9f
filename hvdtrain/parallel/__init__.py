"""Model parallelism on the mesh of ranks, one folder per kind.

Start with `parallelize.py` and `pipeline/schedule.py`. May import `gradients`, `state`, `layers` and everything below;
`training` runs the split models.
"""
