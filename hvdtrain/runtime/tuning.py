"""Settings of the exchange that must be in the environment before MPI and Horovod start."""

import math
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.runtime.interfaces import leave_out_bridges

CYCLE_TIME = "HOROVOD_CYCLE_TIME"
FUSION_THRESHOLD = "HOROVOD_FUSION_THRESHOLD"
AUTOTUNE = "HOROVOD_AUTOTUNE"
BUFFER_BYTES = 16 * 2**20
"""Of tensors that share a message."""

EXCHANGE_DEFAULTS = {
    # MPI's waiting thread spins on the core that computes. Yielding made a step of ResNet-20 1.7x, of a
    # 12.7 M transformer 1.6x and of a 58.6 M MLP 1.2x faster (2 ranks, 2 cores).
    "OMPI_MCA_mpi_yield_when_idle": "1",
    # On top of yielding, a smaller fusion buffer (Horovod's own: 128 MB), with a shorter cycle, took another 5 % off
    # the transformer's step and 15 % off the MLP's; 4 to 32 MB differ by 5 %.
    FUSION_THRESHOLD: str(BUFFER_BYTES),
}

TCP_PROTOCOL = {"OMPI_MCA_btl_tcp_flags": "send,inplace"}
"""How Open MPI sends large messages to other hosts. By its own choice, "put", it writes a message in one go and hardly
reads meanwhile, so that a link carries one direction at a time: two hosts at 1 Gbit/s added up 100 MB in 1.5 s, and
with these flags in 1.0 s."""

GLOO_PATIENCE = "HOROVOD_GLOO_TIMEOUT_SECONDS"

PATIENCE = "300"
"""Gloo ends a job whose ranks heard nothing of one for so many seconds (its own: 30). A machine that swaps or is saved
stands still for longer; of a rank that failed the others hear at once, over the control channel."""

PATIENCE_IF_ELASTIC = "60"
"""The job goes on without a rank that has fallen silent for so long, or has not connected since all others have: it
starts Horovod as soon as TensorFlow is imported."""
LEAST_PATIENCE = 10
"""Seconds: a process may stand still for some on a busy machine."""

ALONE = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
"""For a process that is alone, whoever started it: some MPI libraries end it in MPI_Init; Gloo starts anywhere."""

TRANSPORTS = "OMPI_MCA_btl"

TUNED = "OMPI_MCA_coll_tuned_"
LARGE_MESSAGES = {
    TUNED + "use_dynamic_rules": "1",
    TUNED + "dynamic_rules_filename": str(Path(__file__).with_name("openmpi-allreduce.conf")),
}
"""How Open MPI adds up large messages; the file has the measurements. A step of the MLP took 0.79 of the time."""


def set_exchange_defaults(environ: MutableMapping[str, str], *, elastic: bool = False) -> None:
    """Put the defaults into `environ` wherever the user has not decided otherwise.

    Args:
        elastic: whether the job goes on without ranks that are lost.
    """
    patience = PATIENCE_IF_ELASTIC if elastic else PATIENCE
    for name, value in {**EXCHANGE_DEFAULTS, **TCP_PROTOCOL, GLOO_PATIENCE: patience}.items():
        environ.setdefault(name, value)
    leave_out_bridges(environ)
    if not any(name.startswith(TUNED) for name in environ):
        environ.update(LARGE_MESSAGES)
    # Libfabric's one-sided transport, which nothing here uses, sleeps for a second in MPI_Finalize. horovodrun has a
    # list of those to leave out ("^openib") of its own; one that names what is wanted stays as it is.
    transports = environ.get(TRANSPORTS, "^")
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^") and "ofi" not in names:
        transports = "^" + ",".join(filter(None, [*names, "ofi"]))
    environ[TRANSPORTS] = transports


def outlast_hangs(environ: MutableMapping[str, str], hang_timeout: float) -> None:
    """Let Gloo wait longer than the watchdog does, which names the ranks; unless the user has set for how long."""
    if environ.get(GLOO_PATIENCE) == PATIENCE:
        environ[GLOO_PATIENCE] = str(max(int(PATIENCE), math.ceil(hang_timeout) + 60))


def lose_silent_ranks(environ: MutableMapping[str, str], hang_timeout: float) -> None:
    """Let Gloo wait no longer than the watchdog, in an elastic job: it goes on without the ranks that are silent.

    Unless the user has set for how long. `horovodrun` counts the same seconds.
    """
    if environ.get(GLOO_PATIENCE) == PATIENCE_IF_ELASTIC and hang_timeout:
        seconds = min(int(PATIENCE_IF_ELASTIC), max(LEAST_PATIENCE, math.ceil(hang_timeout)))
        environ[GLOO_PATIENCE] = str(seconds)


def fuse_nothing(environ: MutableMapping[str, str]) -> None:
    """Have Horovod send each tensor in a message of its own, before it starts.

    By itself it puts those into one message that happen to be ready at the same time. With more than two ranks the
    place of an element in the message decides which rank adds first, and so the last bit of the sum.

    Raises:
        LaunchError: the environment asks for something else.
    """
    wanted = {FUSION_THRESHOLD: (EXCHANGE_DEFAULTS[FUSION_THRESHOLD], "0"), AUTOTUNE: ("", "0")}
    for name, allowed in wanted.items():
        if environ.get(name, allowed[0]) not in allowed:
            raise LaunchError(
                f"{opt('deterministic', True)} leaves it to nobody which tensors share a message. "
                f"Received: {name}={environ[name]}. Take it out of the environment, or leave out one of them."
            )
    environ[FUSION_THRESHOLD] = "0"


def fuses(environ: Mapping[str, str]) -> bool:
    """Return whether Horovod puts several tensors into one message."""
    return environ.get(FUSION_THRESHOLD) != "0"
