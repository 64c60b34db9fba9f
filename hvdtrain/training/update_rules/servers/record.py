"""Recorded order of the servers' actions, and a summary of the staleness."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.config.errors import ConfigError, opt

Event = tuple[int, int]
"""Kind of a server's action, and the worker it was for."""


def described(staleness: Counter[int]) -> str:
    """Return a histogram of staleness in words."""
    values = np.repeat(list(staleness), list(staleness.values()))
    median, high = np.percentile(values, [50, 95], method="lower")
    return f"median {median}, 95 % up to {high}, at most {values.max()}"


def recorded(path: str, backend: Backend) -> Sequence[Event]:
    """Return what this rank's server did in a recorded run. Raises ConfigError if it had other ranks."""
    try:
        servers = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{opt('replay', path)} cannot be read ({getattr(error, 'strerror', error)}).") from error
    if len(servers) != backend.size:
        raise ConfigError(
            f"{opt('replay', path)} was recorded on {len(servers)} ranks. Received: {backend.size} ranks."
        )
    return [(kind, worker) for kind, worker in servers[backend.index]]


def check_writable(path: str, backend: Backend) -> None:
    """Check, before a training whose order is to be recorded, that it can be. Raises ConfigError. Collective."""
    problem = None
    if backend.primary:
        try:
            Path(path).touch()
        except OSError as error:
            problem = error.strerror
    problem = gather(backend, problem)[0]
    if problem is not None:
        raise ConfigError(f"{opt('record', path)} cannot be written ({problem}).")
