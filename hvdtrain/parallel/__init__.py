"""Layouts of one model on the mesh of ranks, a folder for each kind.

Start with `parallelize.py` and `pipeline/schedule.py`. May import `gradients`, `state`, `layers` and what lies below;
`training` runs what is made here.
"""
