"""Where ranks meet that were started without MPI and without `horovodrun`: a store that rank 0 keeps for the job.

`meeting.py` opens or finds it; `serve.py` is the store, in a process of its own beside rank 0. May import `launchers`,
`control` and Horovod's store.
"""

from hvdtrain.runtime.rendezvous.meeting import Meeting, meet, meet_and_wait

__all__ = ["Meeting", "meet", "meet_and_wait"]
