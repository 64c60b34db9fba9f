"""Everything that touches Horovod, MPI, processes and devices; start with `session.py`.

Who started this process and with how many others (`launchers.py`), where they meet if nobody else sees to it
(`rendezvous.py`), the control channel between them (`control/`), the ranks of one world with their mesh and
collectives (`world.py`), what follows from a failure (`failures.py`), and the checks of `doctor` (`diagnosis/`). May
import `config` only.
"""
