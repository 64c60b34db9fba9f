"""Let ranks meet at a store on rank 0, where they were started without MPI and without `horovodrun`.

Rank 0 starts the store (`store_server.py`); the others find it on one of a few ports that follow from the job's secret.
Each rank then sets the variables that `horovodrun` would set. IPv4: Horovod knows no other.
"""

import atexit
import contextlib
import hmac
import http.client
import ipaddress
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import secret_from_environment
from hvdtrain.runtime.control.store import Store, open_store
from hvdtrain.runtime.horovod_patches import require_patch
from hvdtrain.runtime.interfaces import interface_by_address
from hvdtrain.runtime.launchers import (
    DRAW_SECRET,
    PLACE,
    SECRET_VARIABLE,
    STARTER_VARIABLE,
    Environment,
    detect_environment,
)
from hvdtrain.runtime.store_server import COMPLETE, STATE, answer, path_of

HOST = "HVDTRAIN_RENDEZVOUS_HOST"
PORT = "HVDTRAIN_RENDEZVOUS_PORT"
TIMEOUT = "HVDTRAIN_RENDEZVOUS_TIMEOUT"
PORTS = (20000, 29999)
"""Below the ephemeral ports of systems (from 32768 on Linux), any of which may be in use."""
LOOPBACK = "127.0.0.1"
_MOST_PORTS = 4
"""Tried one after the other, on rank 0 until one is free."""
_LEAST_SECRET = 16
"""Characters. Whoever guesses the secret joins the job, and may try as fast as the network lets him."""
_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_INTERFACE = "HOROVOD_GLOO_IFACE"
_CALL_S = 2.0
_LEFT = "left"
_FAREWELL_S = 10.0
"""Rank 0, with which the store ends, waits so long for ranks that are still about to leave."""


@dataclass(frozen=True)
class Settings:
    """Settings of the ranks' rendezvous."""

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
        """The token that each request to the store begins with."""
        return _derived(self.secret, "token", self.job_id).hex()[:32]

    @property
    def key(self) -> bytes:
        """The key with which the store signs its answer to ranks that look for it."""
        return _derived(self.secret, "hello", self.job_id)


def read_settings(environment: Environment, environ: Mapping[str, str], timeout: float) -> Settings:
    """Return the settings of this job's meeting; `timeout` holds unless HVDTRAIN_RENDEZVOUS_TIMEOUT is set.

    Raises:
        LaunchError: the secret is missing or short, or a variable is malformed.
    """
    secret = secret_from_environment(environ) or b""
    if len(secret) < _LEAST_SECRET:
        raise LaunchError(
            f"The secret of a job whose ranks meet at rank 0 must have at least {_LEAST_SECRET} characters. Received: "
            f"{len(secret)}. In the job script: export {SECRET_VARIABLE}={DRAW_SECRET}"
        )
    text = environ.get(PORT) or "{}-{}".format(*PORTS)
    match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", text, re.ASCII)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise LaunchError(f"{PORT} must be a port from 1024 to 65535, or FIRST-LAST. Received: {text!r}.")
    wait = environ.get(TIMEOUT) or str(timeout)
    if not re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?", wait, re.ASCII) or float(wait) == 0:
        raise LaunchError(f"{TIMEOUT} must be a positive number of seconds. Received: {wait!r}.")
    # Nobody without the secret can foresee the ports, and occupy them before.
    count = min(_MOST_PORTS, last - first + 1)
    drawn = (_derived(secret, f"port {i}", environment.job_id)[:4] for i in range(100 * count))
    ports = tuple(dict.fromkeys(first + int.from_bytes(each, "big") % (last - first + 1) for each in drawn))[:count]
    host = environ.get(HOST) or None
    return Settings(secret=secret, job_id=environment.job_id, ports=ports, host=host, timeout=float(wait))


def _derived(secret: bytes, purpose: str, job_id: str) -> bytes:
    return hmac.digest(secret, f"rendezvous\0{purpose}\0{job_id}".encode(), "sha256")


@dataclass(frozen=True)
class Meeting:
    """This rank's part in the meeting, which it leaves at the end of the process."""

    environment: Environment
    store: Store
    timeout: float
    """Seconds to wait for ranks that have not come yet."""
    served_by: "StoreProcess | None" = None
    """On rank 0."""

    def complete(self) -> None:
        """Note that all ranks have come; one more is refused from now on."""
        if self.environment.rank == 0:
            self.store.put(*STATE, COMPLETE)

    def leave(self) -> None:
        """Leave the store; rank 0 ends it, once all others have left, or after some seconds."""
        with contextlib.suppress(LaunchError):
            if self.environment.rank != 0:
                self.store.with_patience(1.0).put(_LEFT, str(self.environment.rank), b"yes")
            elif self.served_by is not None:
                deadline, left = time.monotonic() + _FAREWELL_S, list(range(1, self.environment.size))
                while left and time.monotonic() < deadline:
                    if self.store.get(_LEFT, str(left[0])) is not None:
                        left.pop(0)
                    else:
                        time.sleep(0.02)
        if self.served_by is not None:
            self.served_by.end()


def meet(environ: MutableMapping[str, str], timeout: float) -> Meeting | None:
    """Open the job's store on rank 0, find it from the other ranks, and write to `environ` what Horovod needs.

    Returns on each rank as soon as the store is there, whether or not others have come; None where there is no meeting:
    under MPI, `horovodrun`, in a process that is alone, and once the ranks have met.

    Raises:
        LaunchError: rank 0 cannot listen, or was not found within `timeout` seconds; a setting is malformed.
    """
    environment = detect_environment(environ)
    if not environment.store_on_rank_0 or _ADDRESS in environ:
        return None
    given = environ.get(_INTERFACE)
    found = {name: address for address, name in interface_by_address().items() if ":" not in address}
    if given and given not in found:
        # The loopback is among them: all ranks of a job may be on this machine.
        have = ", ".join(f"{name} ({address})" for name, address in found.items())
        raise LaunchError(
            f"{_INTERFACE} must be an interface of this machine with an IPv4 address. Received: {given!r}. It has "
            f"{have}."
        )
    settings, served_by = read_settings(environment, environ, timeout), None
    if environment.rank == 0:
        require_patch("store-token", "The store of ranks that start without MPI and without horovodrun")
        own = _own_address(environment, settings)
        served_by = StoreProcess(own, settings)
        address, port, here = own or LOOPBACK, served_by.port, own or _address_of_others(environment)
    else:
        host = settings.host or (LOOPBACK if len(environment.hosts) == 1 else environment.hosts[0])
        address, port = find_store(host, settings)
        here = address_towards(address)
    interface = given or interface_of(here)
    if interface is None:
        raise LaunchError(f"No interface of this machine has the address {here}. Set {_INTERFACE} to one of them.")
    environ.update(
        {
            **{f"HOROVOD_{name.upper()}": str(getattr(environment, name)) for name in PLACE},
            "HOROVOD_HOSTNAME": environment.hostname,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_GLOO_RENDEZVOUS_PORT": str(port),
            _ADDRESS: f"{address}:{port}/{settings.token}",
            _INTERFACE: interface,
            STARTER_VARIABLE: environment.launcher,
        }
    )
    meeting = Meeting(environment, Store(environ[_ADDRESS], port), settings.timeout, served_by)
    if environ is os.environ:
        atexit.register(meeting.leave)
    return meeting


def meet_and_wait(environ: MutableMapping[str, str], timeout: float) -> None:
    """Meet as `meet` does, and wait until all ranks have come; for scripts without a channel between them.

    Raises:
        LaunchError: as `meet`, or a rank did not come; it is named.
    """
    meeting = meet(environ, timeout)
    if meeting is not None:
        open_store(detect_environment(environ), timeout=meeting.timeout, environ=environ).close()
        meeting.complete()


class StoreProcess:
    """A process beside rank 0 that keeps the job's store; it ends with rank 0 at the latest.

    Args:
        address: where it listens; "" for all addresses.
        settings: of the meeting.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(self, address: str, settings: Settings) -> None:
        command = [sys.executable, "-m", "hvdtrain.runtime.store_server"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._owner = os.getpid()
        order = {"address": address, "ports": settings.ports, "token": settings.token, "key": settings.key.hex()}
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline() or b"{}")
        if "port" not in answer:
            self.end()
            raise LaunchError(
                f"Rank 0 cannot open the store of the job on {address or 'any address'}, port "
                f"{', '.join(map(str, settings.ports))}: {answer.get('error', 'its process has ended')}. "
                f"{PORT}=FIRST-LAST gives it ports to choose from, {HOST} the name or address of rank 0's host."
            )
        self.port = int(answer["port"])

    def end(self) -> None:
        """End it, if it is a child of this process; may be called again."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()


def find_store(host: str, settings: Settings) -> tuple[str, int]:
    """Return the address and the port of the job's store, once it is there.

    Raises:
        LaunchError: it was not found in time; tells who answers in its place.
    """
    deadline, pause = time.monotonic() + settings.timeout, 0.02
    while True:
        seen = [f"the name {host} has no IPv4 address"]
        with contextlib.suppress(OSError):
            address, answered, failed = resolve(host), [], []
            for port in settings.ports:
                nonce = secrets.token_hex(16)
                try:
                    with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_CALL_S)) as connection:
                        connection.request("GET", path_of(nonce))
                        response = connection.getresponse()
                        body = response.read(100)
                except (OSError, http.client.HTTPException) as error:
                    failed.append(f"{address}:{port} {str(error) or type(error).__name__}")
                    continue
                if response.status == http.client.OK and hmac.compare_digest(body, answer(settings.key, port, nonce)):
                    return address, port
                who = "another program answers, or a job with another secret,"
                if response.status == http.client.CONFLICT:
                    who = "all ranks have come already, and this is one more, or of a later start of the job,"
                answered.append(f"{who} on {address}:{port}")
            seen = answered + failed
        if time.monotonic() > deadline:
            raise LaunchError(
                f"Rank 0 was not found on {host} within {settings.timeout:g} s, at port "
                f"{', '.join(map(str, settings.ports))} (last: {seen[0]}). If rank 0 has failed, its own message says "
                f"why; {TIMEOUT}=SECONDS waits longer for one that starts late. {HOST} says by which name or address "
                f"the other hosts reach that of rank 0, {PORT}=FIRST-LAST which ports a firewall lets through."
            )
        time.sleep(pause)
        pause = min(1.5 * pause, 0.5)


def resolve(name: str) -> str:
    """Return the address of a host; names without a domain are also searched in this machine's own.

    Raises:
        OSError: it has none, or not yet.
    """
    _, _, domain = socket.getfqdn().partition(".")
    for each in (name, f"{name}.{domain}") if domain and "." not in name else (name,):
        with contextlib.suppress(OSError):
            return str(socket.getaddrinfo(each, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    raise OSError(f"unknown host {name}")


def address_towards(address: str) -> str:
    """Return the address of this machine from which packets to `address` go out. Raises OSError: there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if this machine has none."""
    found = interface_by_address()
    loopback = found.get(LOOPBACK) if ipaddress.ip_address(address).is_loopback else None
    return found.get(address, loopback)


def _own_address(environment: Environment, settings: Settings) -> str:
    """Return the address of this host that the others will use; "" if it cannot be told from here.

    Debian gives a host's own name an address of the loopback interface, and a cluster's DNS the right one.
    """
    if settings.host is None and len(environment.hosts) == 1:
        return LOOPBACK
    try:
        address = resolve(settings.host or environment.hosts[0])
    except OSError:
        return ""
    surely = settings.host is not None or not ipaddress.ip_address(address).is_loopback
    return address if surely and interface_of(address) is not None else ""


def _address_of_others(environment: Environment) -> str:
    """Return the address of this host from which it reaches the others, or anybody."""
    for name in (*environment.hosts[1:2], "192.0.2.1"):  # the second belongs to nobody
        with contextlib.suppress(OSError):
            return address_towards(resolve(name))
    return LOOPBACK
