"""Horovod's own launcher, as the environment's `horovodrun` starts it.

`command.py` is the command, `build_check.py` finds out what Horovod was built with, `guarded_store.py` keeps others out
of the rendezvous store, `private_environment.py` keeps the ranks' environment variables off command lines, which every
user of a machine can read, and `silent_ranks.py` gives up ranks of an elastic job that are gone without a word.
"""

from hvdtrain.runtime.horovodrun.command import run_commandline

__all__ = ["run_commandline"]
