"""Build Horovod for the active Python environment (`python -m hvdtrain setup`); start with `install.py`.

Which MPI (`mpi.py`), the patched sources, the build and the cache of wheels (`build.py`, `patches/`), GPUs (`gpu.py`),
prerequisite checks and environment activation (`install.py`). Imports neither TensorFlow nor Horovod, and from other
rooms only `runtime` and `config`.
"""
