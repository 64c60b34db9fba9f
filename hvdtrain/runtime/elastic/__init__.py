"""Elastic jobs: worlds that follow one another in the same processes, as ranks are lost and others come.

`horovodrun` with host discovery decides who takes part; Horovod tells that a rank is gone. Start with `worlds.py`, the
loop over worlds; `engine.py` starts Horovod for each of them, `hosts.py` hears of hosts that come and go,
`heartbeat.py` tells `horovodrun` that this process lives. May import what the other files of `runtime` may.
"""
