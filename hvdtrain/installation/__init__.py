"""What `python -m hvdtrain setup` does: builds Horovod for the active Python environment; start with `install.py`.

Which MPI (`mpi.py`), the patched sources (`sources.py`, `patches/`), the wheel and its cache (`build.py`, `wheel.py`),
what is checked before (`requirements.py`) and what activating the environment sets afterwards (`activation.py`). Needs
neither TensorFlow nor Horovod to be imported. May import `runtime` and `config` only.
"""
