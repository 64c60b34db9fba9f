"""Everything that touches Horovod, MPI, processes and devices; start with `session.py`.

Who launched this process and with how many others, the control channel between them (`control/`), the mesh, the
collectives, failures, and the checks of `doctor` (`diagnosis/`). May import `config` only.
"""
