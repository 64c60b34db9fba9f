"""Starting Horovod a second time in one process."""

from collections.abc import Callable, MutableMapping

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


def restart_horovod(start: Callable[[], object]) -> None:
    """Shut Horovod down, for this generation of the job, and start it again.

    Args:
        start: starts it, by `horovod.init` and what goes with that. It was started before in an environment that had
            gone through `keep_restartable`.
    """
    import horovod.tensorflow as hvd

    hvd.shutdown()
    start()
