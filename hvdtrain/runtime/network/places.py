"""Where each rank of a job runs."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.interfaces import own_addresses
from hvdtrain.runtime.launchers import Environment


@dataclass(frozen=True)
class Place:
    """The host of a rank."""

    host: str
    """Its name."""
    addresses: Sequence[str]
    """By which others may reach it."""


def exchange_places(control: ControlChannel, environment: Environment, *, timeout: float) -> list[Place]:
    """Return the place of each rank; every rank calls it.

    Raises:
        LaunchError: a rank did not come within `timeout` seconds.
    """
    mine = json.dumps({"host": environment.hostname, "addresses": list(own_addresses())})
    return [Place(**json.loads(theirs)) for theirs in control.exchange(mine.encode(), timeout=timeout)]
