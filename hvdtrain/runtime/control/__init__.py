"""The control channel: how ranks talk outside the collectives, before TensorFlow is loaded and while collectives hang.

Start with `channel.py`, the base; `open_control` in `runtime/link.py` chooses between MPI (`mpi.py`) and the store
of horovodrun (`store.py`), over both of which `rooted.py` works. `signing.py` keeps others out. Imports neither
TensorFlow nor Horovod; mpi4py only under an MPI launch.
"""
