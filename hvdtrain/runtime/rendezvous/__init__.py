"""Where ranks meet that were started without MPI and without `horovodrun`: a store that rank 0 keeps for the job.

Start with `meeting.py`. `serve.py` is the store, in a process of its own beside rank 0, which `store_process.py`
starts; `caller.py` finds it from the other ranks, and `hello.py` is how each side knows the other. `network.py`
finds addresses and interfaces, `settings.py` reads the environment variables. May import `launchers`,
`control` and Horovod's store.
"""

from hvdtrain.runtime.rendezvous.meeting import Meeting, meet, meet_and_wait

__all__ = ["Meeting", "meet", "meet_and_wait"]
