"""The control channel: how ranks talk outside the collectives, before TensorFlow is loaded and while collectives hang.

Start with `channel.py`. Imports neither TensorFlow nor Horovod; mpi4py only under an MPI launch.
"""
