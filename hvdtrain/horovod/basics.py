"""Initialization, and Horovod's own functions for process sets and queries."""

import os
from typing import Any

from horovod.tensorflow import mpi_ops as _horovods

from hvdtrain.config.errors import LoneRanksError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.horovod import names
from hvdtrain.horovod.names import *  # noqa: F403
from hvdtrain.horovod.names import ProcessSet, global_process_set, rank, size
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.control.mpi import prepare_mpi
from hvdtrain.runtime.failures import show_alone
from hvdtrain.runtime.horovod_patches import warn_if_unpatched
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.malloc import choose_malloc
from hvdtrain.runtime.process_sets import is_elastic
from hvdtrain.runtime.rendezvous import meet_and_wait
from hvdtrain.runtime.tuning import ALONE, set_exchange_defaults
from hvdtrain.runtime.world import refuse_lone_ranks

__all__ = ["init", *(name for name in vars(names) if not name.startswith("_"))]


def init(*args: Any, **kwargs: Any) -> None:
    """Initialize Horovod; the arguments are `comm` and `process_sets`, as Horovod's own.

    A process set of all ranks, on which Horovod's own `init` fails, is aliased to the global one. Settings of the
    exchange that the environment leaves unset take the values measured for hvdtrain (`hvdtrain/runtime/tuning.py`),
    except in elastic jobs. Ranks that were started without MPI and `horovodrun`, by `srun` or as pods of an Indexed
    Job, meet at a store that rank 0 keeps.
    """
    try:
        _init(*args, **kwargs)
    except LoneRanksError as error:
        end_process(show_alone(None, error))


def _init(comm: Any = None, process_sets: Any = None) -> None:
    choose_malloc(RuntimeConfig.malloc)
    warn_if_unpatched()
    sets = [] if process_sets is None or isinstance(process_sets, str) else list(process_sets)
    whole: list[ProcessSet] = []
    environment = None if is_elastic() else detect_environment(os.environ)
    if environment is not None:
        set_exchange_defaults(os.environ)
        meet_and_wait(os.environ, RuntimeConfig.start_timeout)
        if environment.controller == "none":
            os.environ.update(ALONE)
        prepare_mpi(environment)
        whole = [one for one in sets if comm is None and one.ranks == list(range(environment.size))]
    ranks = [one.ranks for one in sets if one.ranks is not None]
    twice = next((each for each in ranks if ranks.count(each) > 1), None)
    if twice is not None:
        raise ValueError(f"Duplicate process sets are not allowed. Received: the ranks {twice} more than once.")
    apart = [one for one in sets if one not in whole]
    _horovods.init(comm, process_sets if isinstance(process_sets, str) else apart)
    if comm is None and environment is not None:
        refuse_lone_ranks(environment, rank(), size())
    for one in whole:
        one.process_set_id = global_process_set.process_set_id
