"""The network between the hosts of a job: this host's interfaces, the sockets to other hosts, links that are cut.

`broken_links.py` is what the watchdog looks at. Nothing here imports Horovod or MPI.
"""
