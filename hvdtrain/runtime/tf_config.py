"""TF_CONFIG: how the processes of tf.distribute's multi-worker strategies find one another."""

import json
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.launchers import Environment

VARIABLE = "TF_CONFIG"
Task = tuple[str, int]
"""What a process is in its cluster: a type, `worker`, `chief` or `ps`, and its number among those of that type."""


def workers_only(size: int) -> list[Task]:
    """Return the tasks of `size` ranks that are all workers, the first being the chief."""
    return [("worker", rank) for rank in range(size)]


def tf_config(addresses: Sequence[str], tasks: Sequence[Task], rank: int) -> dict[str, Any]:
    """Return what TF_CONFIG holds for `rank` of those with `tasks`, which are at `addresses` (`host:port`)."""
    cluster: dict[str, list[str]] = {}
    for address, (kind, _) in zip(addresses, tasks, strict=True):
        cluster.setdefault(kind, []).append(address)
    kind, index = tasks[rank]
    return {"cluster": cluster, "task": {"type": kind, "index": index}}


def addresses_of(places: Sequence[tuple[str, int]]) -> list[str]:
    """Return `host:port` for the (host name, port) of each rank; ranks of one machine need no name service."""
    alone = len({host for host, _ in places}) == 1
    return [f"{'127.0.0.1' if alone else host}:{port}" for host, port in places]


def check_given(text: str, environment: Environment, tasks: Sequence[Task]) -> None:
    """Refuse a TF_CONFIG, written by somebody else, that is not about the ranks of this job.

    Args:
        text: what it holds.
        environment: this process's place.
        tasks: what each rank is to be.

    Raises:
        LaunchError: it cannot be read, or other tasks or another place are in it.
    """
    try:
        given = json.loads(text)
        cluster = {kind: len(addresses) for kind, addresses in given["cluster"].items()}
        task = str(given["task"]["type"]), int(given["task"]["index"])
    except (json.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"{VARIABLE} cannot be read ({type(error).__name__} {error}). Received: {text!r}.") from error
    wanted = Counter(kind for kind, _ in tasks)
    if set(cluster) | {task[0]} != set(wanted):
        raise LaunchError(
            f"{VARIABLE} must hold {' and '.join(wanted)} tasks only, and some of each. "
            f"Received: {', '.join(cluster)}, for {task[0]} {task[1]}."
        )
    if sum(cluster.values()) != environment.size and environment.launcher == "none":
        raise LaunchError(
            f"{VARIABLE} names {cluster['worker']} workers, and nobody started this process as one of them: start them "
            "with horovodrun or mpirun, which takes the same TF_CONFIG, or none."
        )
    if (cluster, task) != (wanted, tasks[environment.rank]):
        raise LaunchError(
            f"{VARIABLE} says {_spoken(task, cluster)}, and rank {environment.rank} of {environment.size} by "
            f"{environment.launcher} is {_spoken(tasks[environment.rank], wanted)}. Unset it, and the ranks agree on "
            "addresses themselves."
        )


def _spoken(task: Task, cluster: Mapping[str, int]) -> str:
    others = ", ".join(f"{count} {kind}" for kind, count in cluster.items() if kind != task[0])
    return f"{task[0]} {task[1]} of {cluster[task[0]]}" + (f" (beside {others})" if others else "")


def agreed_tf_config(
    control: ControlChannel,
    environment: Environment,
    environ: Mapping[str, str],
    tasks: Sequence[Task],
    *,
    timeout: float,
) -> str:
    """Return this rank's TF_CONFIG: the one that is set, or one with free ports that the ranks tell one another.

    Args:
        control: the channel to the other ranks.
        environment: this process's place.
        environ: where one may be set.
        tasks: what each rank is to be, in the order of ranks.
        timeout: seconds to wait for the other ranks.

    Raises:
        LaunchError: one that is set does not fit; only some ranks have one; a rank is missing.
    """
    given = environ.get(VARIABLE, "")
    if given:
        check_given(given, environment, tasks)
    with socket.socket() as held:
        held.bind(("", 0))
        mine = {"given": bool(given), "host": environment.hostname, "port": held.getsockname()[1]}
        everyone = gather(control, mine, timeout=timeout)
    if len({other["given"] for other in everyone}) > 1:
        raise LaunchError(f"{VARIABLE} is set on some ranks only: set it on all of them, or on none.")
    places = [(str(other["host"]), int(other["port"])) for other in everyone]
    return given or json.dumps(tf_config(addresses_of(places), tasks, environment.rank))
