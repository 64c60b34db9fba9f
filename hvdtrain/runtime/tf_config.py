"""TF_CONFIG: how the workers of tf.distribute's multi-worker strategies find one another."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control import ControlChannel
from hvdtrain.runtime.environment import Environment

VARIABLE = "TF_CONFIG"


def tf_config(addresses: Sequence[str], index: int) -> dict[str, Any]:
    """Return what TF_CONFIG holds for worker `index` of those at `addresses` (`host:port`), the chief first."""
    return {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}


def addresses_of(places: Sequence[tuple[str, int]]) -> list[str]:
    """Return `host:port` for the (host name, port) of each rank; ranks of one machine need no name service."""
    alone = len({host for host, _ in places}) == 1
    return [f"{'127.0.0.1' if alone else host}:{port}" for host, port in places]


def check_given(text: str, environment: Environment) -> None:
    """Refuse a TF_CONFIG, written by somebody else, that is not about the ranks of this job.

    Raises:
        LaunchError: it cannot be read, or another number of workers or another place is in it.
    """
    try:
        given = json.loads(text)
        workers, kind, index = given["cluster"]["worker"], given["task"]["type"], int(given["task"]["index"])
        others = sorted(set(given["cluster"]) - {"worker"})
    except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise LaunchError(f"{VARIABLE} cannot be read ({type(error).__name__} {error}). Received: {text!r}.") from error
    if others or kind != "worker":
        raise LaunchError(
            f"{VARIABLE} must hold workers only, the first being the chief. Received: {', '.join(others) or kind}."
        )
    if len(workers) != environment.size and environment.launcher == "none":
        raise LaunchError(
            f"{VARIABLE} names {len(workers)} workers, and nobody started this process as one of them: start them with "
            "horovodrun or mpirun, which takes the same TF_CONFIG, or none."
        )
    if (len(workers), index) != (environment.size, environment.rank):
        raise LaunchError(
            f"{VARIABLE} says worker {index} of {len(workers)}, {environment.launcher} says rank {environment.rank} of "
            f"{environment.size}. Unset it, and the ranks agree on addresses themselves."
        )


def agreed_tf_config(
    control: ControlChannel, environment: Environment, environ: Mapping[str, str], *, timeout: float
) -> str:
    """Return this rank's TF_CONFIG: the one that is set, or one with free ports that the ranks tell one another.

    Raises:
        LaunchError: one that is set does not fit; only some ranks have one; a rank is missing.
    """
    given = environ.get(VARIABLE, "")
    if given:
        check_given(given, environment)
    with socket.socket() as held:
        held.bind(("", 0))
        mine = {"given": bool(given), "host": environment.hostname, "port": held.getsockname()[1]}
        everyone = [json.loads(text) for text in control.exchange(json.dumps(mine).encode(), timeout=timeout)]
    if len({other["given"] for other in everyone}) > 1:
        raise LaunchError(f"{VARIABLE} is set on some ranks only: set it on all of them, or on none.")
    places = [(str(other["host"]), int(other["port"])) for other in everyone]
    return given or json.dumps(tf_config(addresses_of(places), environment.rank))
