"""Settings of the exchange that must be in the environment before MPI and Horovod start."""

from collections.abc import MutableMapping
from pathlib import Path

from hvdtrain.runtime.reset import NOT_TOGETHER, keep_restartable

EXCHANGE_DEFAULTS = {
    # MPI's waiting thread spins on the core that computes. Yielding made a step of ResNet-20 1.7x, of a
    # 12.7 M transformer 1.6x and of a 58.6 M MLP 1.2x faster (2 ranks, 2 cores).
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # On top of yielding, a shorter cycle and a smaller fusion buffer (Horovod's own: 1 ms, 128 MB) took another
    # 5 % off the transformer's step and 15 % off the MLP's; 0.1 to 2 ms and 4 to 32 MB differ by 5 %.
    "HOROVOD_CYCLE_TIME": "0.5",
    "HOROVOD_FUSION_THRESHOLD": str(16 * 2**20),
}

PATIENCE = {"HOROVOD_GLOO_TIMEOUT_SECONDS": "300"}
"""Gloo ends a job whose ranks heard nothing of one for so many seconds (its own: 30). A machine that swaps or is saved
stands still for longer; of a rank that failed the others hear at once, over the control channel."""

ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
"""For a process that no launcher started: some MPI libraries end it in MPI_Init; Gloo starts anywhere."""

TRANSPORTS = "OMPI_MCA_btl"

TUNED = "OMPI_MCA_coll_tuned_"
LARGE_MESSAGES = {
    TUNED + "use_dynamic_rules": "1",
    TUNED + "dynamic_rules_filename": str(Path(__file__).with_name("openmpi-allreduce.conf")),
}
"""How Open MPI adds up large messages; the file has the measurements. A step of the MLP took 0.79 of the time."""


def set_exchange_defaults(environ: MutableMapping[str, str], *, restartable: bool = False) -> None:
    """Put the defaults into `environ` wherever the user has not decided otherwise.

    Args:
        environ: the environment.
        restartable: leave out what would keep Horovod from being started again in this process.
    """
    if restartable:
        keep_restartable(environ)
    for name, value in {**EXCHANGE_DEFAULTS, **PATIENCE}.items():
        if not (restartable and name in NOT_TOGETHER):
            environ.setdefault(name, value)
    if not any(name.startswith(TUNED) for name in environ):
        environ.update(LARGE_MESSAGES)
    environ[TRANSPORTS] = _without_ofi(environ.get(TRANSPORTS, "^"))


def _without_ofi(transports: str) -> str:
    """Add libfabric's one-sided transport, which nothing here uses, to a list of those that are left out.

    It sleeps for a second in MPI_Finalize. horovodrun has such a list of its own ("^openib"); one that names what is
    wanted stays as it is.
    """
    names = transports.removeprefix("^").split(",")
    if not transports.startswith("^") or "ofi" in names:
        return transports
    return "^" + ",".join(filter(None, [*names, "ofi"]))
