"""The command that starts a job's ranks, for the place where it is to be started.

`sites.py` finds out whether a scheduler gave this process hosts, `mpi.py` which MPI is at hand and what its flags are
called, `command.py` puts the words together: read it first. May import `config`, `runtime/launchers` and
`runtime/topology.py`.
"""
