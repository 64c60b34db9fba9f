"""Starting Horovod a second time in one process."""

from collections.abc import Callable, Mapping, MutableMapping

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.control.store import Store
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.warning import warn_on_first

NOT_TOGETHER = ("HOROVOD_CYCLE_TIME", "HOROVOD_FUSION_THRESHOLD")
"""Horovod that was started with both of these crashes when it is started again, with or without them: its
`ParameterManager::BayesianParameter` then has nothing left to tune, and writes to a null pointer. One alone is fine."""


def keep_restartable(environ: MutableMapping[str, str]) -> None:
    """Take the cycle time out of `environ`, before Horovod's first start, where it would keep it from a second."""
    if all(name in environ for name in NOT_TOGETHER):
        cycle_time, threshold = NOT_TOGETHER
        warn_on_first(
            f"{cycle_time} is not used: Horovod crashes when ranks come or go if both it and {threshold} are set.",
            stacklevel=2,
        )
        del environ[cycle_time]


def forget_meeting(
    control: ControlChannel, environment: Environment, environ: Mapping[str, str], timeout: float
) -> None:
    """Clear horovodrun's store of the addresses under which the ranks met before, where they met there.

    The store drops them once every rank has deleted a key, but forgets who has whenever it clears any scope: a fast
    rank would then be told the old address of a slow one. All ranks call it, before they start Horovod again.

    Raises:
        LaunchError: the store does not answer, or a rank does not come within `timeout` seconds.
    """
    if environment.controller != "gloo":
        return
    store = Store(environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
    scopes = {
        "global": (environment.rank, environment.size),
        f"local_{environment.hostname}": (environment.local_rank, environment.local_size),
        f"cross_{environment.local_rank}": (environment.cross_rank, environment.cross_size),
    }
    control.barrier(timeout)
    for scope, (rank, size) in scopes.items():
        left = size if rank == 0 else 0
        while left and store.get(scope, "0") is not None:
            store.delete(scope, "0")
            left -= 1
    control.barrier(timeout)


def restart_horovod(start: Callable[[], object]) -> None:
    """Shut Horovod down, for this generation of the job, and start it again.

    Args:
        start: starts it, by `horovod.init` and what goes with that. It was started before in an environment that had
            gone through `keep_restartable`.
    """
    import horovod.tensorflow as hvd

    hvd.shutdown()
    start()
