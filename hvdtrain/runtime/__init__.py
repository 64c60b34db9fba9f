"""Everything that touches Horovod, MPI and processes."""
