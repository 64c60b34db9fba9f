"""What the environment says about the meeting of the ranks, and what follows from the job's secret."""

import hmac
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import secret_from_environment
from hvdtrain.runtime.launchers import DRAW_SECRET, SECRET_VARIABLE, Environment

HOST = "HVDTRAIN_RENDEZVOUS_HOST"
PORT = "HVDTRAIN_RENDEZVOUS_PORT"
TIMEOUT = "HVDTRAIN_RENDEZVOUS_TIMEOUT"

PORTS = (20000, 29999)
"""Below those that systems give to connections of their own (from 32768 on Linux), which might be any of them."""
_MOST_PORTS = 4
"""Tried one after the other, on rank 0 until one is free."""
_LEAST_SECRET = 16
"""Characters. Whoever guesses the secret joins the job, and may try as fast as the network lets him."""


@dataclass(frozen=True)
class Settings:
    """Where and how the ranks of this job meet."""

    secret: bytes
    job_id: str
    ports: tuple[int, ...]
    """In the order in which they are tried; the same on every rank."""
    host: str | None
    """Where rank 0 is, if the user has named it."""
    timeout: float
    """Seconds to wait for the other ranks."""

    @property
    def token(self) -> str:
        """What each request to the store begins with."""
        return _derived(self.secret, "token", self.job_id).hex()[:32]

    @property
    def key(self) -> bytes:
        """With which the store signs its answer to who looks for it."""
        return _derived(self.secret, "hello", self.job_id)


def read_settings(environment: Environment, environ: Mapping[str, str], timeout: float) -> Settings:
    """Return the settings of this job's meeting.

    Args:
        environment: this process's place.
        environ: environment variables.
        timeout: seconds to wait for the other ranks, unless HVDTRAIN_RENDEZVOUS_TIMEOUT says otherwise.

    Raises:
        LaunchError: the secret is missing or short, or a variable is malformed.
    """
    secret = secret_from_environment(environ) or b""
    if len(secret) < _LEAST_SECRET:
        raise LaunchError(
            f"The secret of a job whose ranks meet at rank 0 must have at least {_LEAST_SECRET} characters. Received: "
            f"{len(secret)}. In the job script: export {SECRET_VARIABLE}={DRAW_SECRET}"
        )
    ports = _ports(secret, environment.job_id, environ.get(PORT))
    seconds = _seconds(environ.get(TIMEOUT), timeout)
    return Settings(
        secret=secret, job_id=environment.job_id, ports=ports, host=environ.get(HOST) or None, timeout=seconds
    )


def _ports(secret: bytes, job_id: str, given: str | None) -> tuple[int, ...]:
    """Draw ports that nobody without the secret can foresee, and occupy before."""
    first, last = PORTS if not given else _range(given)
    count = min(_MOST_PORTS, last - first + 1)
    drawn = (_derived(secret, f"port {i}", job_id) for i in range(100 * count))
    ports = dict.fromkeys(first + int.from_bytes(each[:4], "big") % (last - first + 1) for each in drawn)
    return tuple(ports)[:count]


def _range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise LaunchError(f"{PORT} must be a port from 1024 to 65535, or FIRST-LAST. Received: {text!r}.")
    return first, last


def _seconds(text: str | None, default: float) -> float:
    if not text:
        return default
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise LaunchError(f"{TIMEOUT} must be a positive number of seconds. Received: {text!r}.")
    return seconds


def _derived(secret: bytes, purpose: str, job_id: str) -> bytes:
    return hmac.digest(secret, f"rendezvous\0{purpose}\0{job_id}".encode(), "sha256")
