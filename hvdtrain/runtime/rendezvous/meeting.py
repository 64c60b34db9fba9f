"""Let ranks meet at a store on rank 0, and give each the variables that lead Horovod and our channel to it.

IPv4: Horovod knows no other.
"""

import atexit
import contextlib
import hmac
import http.client
import ipaddress
import json
import math
import os
import re
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.signing import secret_from_environment
from hvdtrain.runtime.control.store import Store, open_store
from hvdtrain.runtime.horovod_patches import require_patch
from hvdtrain.runtime.interfaces import interfaces
from hvdtrain.runtime.launchers import DRAW_SECRET, SECRET_VARIABLE, STARTER_VARIABLE, Environment, detect_environment
from hvdtrain.runtime.rendezvous.serve import COMPLETE, STATE, is_answer, path_of

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


def resolve(name: str) -> str:
    """Return the address of a host; names without a domain are also searched in this machine's own.

    Raises:
        OSError: it has none, or not yet.
    """
    try:
        return _lookup(name)
    except OSError:
        _, _, domain = socket.getfqdn().partition(".")
        if not domain or "." in name:
            raise
        return _lookup(f"{name}.{domain}")


def address_towards(address: str) -> str:
    """Return the address of this machine from which packets to `address` go out; none is sent.

    Raises:
        OSError: there is no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`; None if this machine has none."""
    for name, found in interfaces().items():
        if address in found:
            return name
    return "lo" if is_loopback(address) and "lo" in interfaces() else None


def is_loopback(address: str) -> bool:
    """Tell whether `address` never leaves the machine."""
    return ipaddress.ip_address(address).is_loopback


def check_interface(name: str) -> None:
    """Check that this machine has an interface of this name with an address.

    Raises:
        LaunchError: it has none; those that it has are named.
    """
    found = {each: addresses for each, addresses in interfaces().items() if addresses}
    if name not in found:
        # The loopback is among them: all ranks of a job may be on this machine.
        have = ", ".join(f"{each} ({addresses[0]})" for each, addresses in found.items())
        raise LaunchError(
            f"HOROVOD_GLOO_IFACE must be an interface of this machine with an IPv4 address. Received: {name!r}. "
            f"It has {have}."
        )


def _lookup(name: str) -> str:
    found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    return str(found[0][4][0])


_CALL_S = 2.0
_LONGEST_PAUSE_S = 0.5
_MOST_BYTES = 100


@dataclass
class Caller:
    """Looks for the store on one host."""

    host: str
    settings: Settings
    _seen: str = field(default="it was not asked", init=False)
    """What became of the latest attempt, for the user."""

    def find(self) -> tuple[str, int]:
        """Return the address and the port of the store, once it is there.

        Raises:
            LaunchError: it was not found in time.
        """
        deadline, pause = time.monotonic() + self.settings.timeout, 0.02
        while True:
            found = self._look()
            if found is not None:
                return found
            if time.monotonic() > deadline:
                raise LaunchError(self._advice())
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)

    def _look(self) -> tuple[str, int] | None:
        try:
            address = resolve(self.host)
        except OSError:
            self._seen = f"the name {self.host} has no IPv4 address"
            return None
        answered, failed = [], []
        for port in self.settings.ports:
            try:
                why_not = self._ask(address, port)
            except (OSError, http.client.HTTPException) as error:
                failed.append(f"{address}:{port} {str(error) or type(error).__name__}")
                continue
            if why_not is None:
                return address, port
            answered.append(f"{why_not} on {address}:{port}")
        self._seen = (answered + failed)[0]
        return None

    def _ask(self, address: str, port: int) -> str | None:
        """Return None if the store of this job answers, and else who does."""
        nonce = secrets.token_hex(16)
        with contextlib.closing(http.client.HTTPConnection(address, port, timeout=_CALL_S)) as connection:
            connection.request("GET", path_of(nonce))
            response = connection.getresponse()
            body = response.read(_MOST_BYTES)
        if response.status == http.client.OK and is_answer(body, self.settings.key, port, nonce):
            return None
        if response.status == http.client.CONFLICT:
            return "all ranks have come already, and this is one more, or of a later start of the job,"
        return "another program answers, or a job with another secret,"

    def _advice(self) -> str:
        return (
            f"Rank 0 was not found on {self.host} within {self.settings.timeout:g} s, at port "
            f"{', '.join(map(str, self.settings.ports))} (last: {self._seen}). If rank 0 has failed, its own message "
            f"says why; {TIMEOUT}=SECONDS waits longer for one that starts late. {HOST} says by which name or address "
            f"the other hosts reach that of rank 0, {PORT}=FIRST-LAST which ports a firewall lets through."
        )


_START_S = 60.0


class StoreProcess:
    """A process beside this one that keeps the job's store; it ends with this one at the latest."""

    def __init__(self, address: str, settings: Settings) -> None:
        """Start it, and wait until it listens.

        Args:
            address: where it is to listen; "" for all addresses.
            settings: of the meeting.

        Raises:
            LaunchError: it cannot listen there.
        """
        self._process = subprocess.Popen(
            [sys.executable, "-m", "hvdtrain.runtime.rendezvous.serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._owner = os.getpid()
        order = {
            "address": address,
            "ports": settings.ports,
            "token": settings.token,
            "key": settings.key.hex(),
        }
        self.port = self._order(json.dumps(order), address, settings)

    def end(self) -> None:
        """End it, if it is a child of this process; to call once more is fine."""
        if os.getpid() == self._owner:
            with contextlib.suppress(OSError):
                self._process.kill()
            self._process.wait()

    def _order(self, order: str, address: str, settings: Settings) -> int:
        assert self._process.stdin is not None, "it is a pipe"
        assert self._process.stdout is not None, "it is a pipe"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()
        said = json.loads(self._process.stdout.readline() or b"{}")
        if "port" in said:
            return int(said["port"])
        self.end()
        ports = ", ".join(map(str, settings.ports))
        raise LaunchError(
            f"Rank 0 cannot open the store of the job on {address or 'any address'}, port {ports}: "
            f"{said.get('error', 'its process has ended')}. {PORT}=FIRST-LAST gives it ports to choose from, {HOST} "
            "the name or address of rank 0's host."
        )


LOOPBACK = "127.0.0.1"
_ADDRESS = "HOROVOD_GLOO_RENDEZVOUS_ADDR"
_INTERFACE = "HOROVOD_GLOO_IFACE"
_LEFT = "left"
_FAREWELL_S = 10.0
"""Rank 0, with which the store ends, waits so long for ranks that are still about to leave."""


@dataclass(frozen=True)
class Meeting:
    """This rank's part in the meeting, which it leaves at the end of the process."""

    environment: Environment
    store: Store
    timeout: float
    """Seconds to wait for ranks that have not come yet."""
    served_by: StoreProcess | None = None
    """On rank 0."""

    def complete(self) -> None:
        """Note that all ranks have come: whoever looks for the store from now on is told that it is not his."""
        if self.environment.rank == 0:
            self.store.put(*STATE, COMPLETE)

    def leave(self) -> None:
        """Leave the store; rank 0 ends it, once all others have left, or after some seconds."""
        if self.environment.rank != 0:
            with contextlib.suppress(LaunchError):
                self.store.with_patience(1.0).put(_LEFT, str(self.environment.rank), b"yes")
        elif self.served_by is not None:
            with contextlib.suppress(LaunchError):
                self._wait_for_others()
            self.served_by.end()

    def _wait_for_others(self) -> None:
        deadline = time.monotonic() + _FAREWELL_S
        left = list(range(1, self.environment.size))
        while left and time.monotonic() < deadline:
            if self.store.get(_LEFT, str(left[0])) is not None:
                left.pop(0)
            else:
                time.sleep(0.02)


def meet(environ: MutableMapping[str, str], timeout: float) -> Meeting | None:
    """Open the job's store on rank 0, find it from the other ranks, and write to `environ` what Horovod needs.

    It returns on each rank as soon as the store is there, whether or not others have come.

    Args:
        environ: of the process.
        timeout: seconds to wait for the other ranks.

    Returns:
        This rank's part; None where there is no meeting: under MPI, `horovodrun`, in a process that is alone, and once
        the ranks have met.

    Raises:
        LaunchError: rank 0 cannot listen, or was not found in time; a setting is malformed.
    """
    environment = detect_environment(environ)
    if not environment.store_on_rank_0 or _ADDRESS in environ:
        return None
    if environ.get(_INTERFACE):
        check_interface(environ[_INTERFACE])
    settings = read_settings(environment, environ, timeout)
    found = _open(environment, settings) if environment.rank == 0 else _find(environment, settings)
    environ.update(_variables(environment, settings, found))
    environ.setdefault(_INTERFACE, found.interface)
    store = Store(environ[_ADDRESS], found.port)
    meeting = Meeting(environment, store, settings.timeout, found.served_by)
    if environ is os.environ:
        atexit.register(meeting.leave)
    return meeting


def meet_and_wait(environ: MutableMapping[str, str], timeout: float) -> None:
    """Meet as `meet` does, and wait until all ranks have come; for those that open no channel between them.

    Raises:
        LaunchError: as there, or a rank did not come; it is named.
    """
    meeting = meet(environ, timeout)
    if meeting is not None:
        open_store(detect_environment(environ), timeout=meeting.timeout, environ=environ).close()
        meeting.complete()


@dataclass(frozen=True)
class _Found:
    """Where the store is, and the way from here to the other ranks."""

    address: str
    port: int
    interface: str
    served_by: StoreProcess | None = None


def _open(environment: Environment, settings: Settings) -> _Found:
    """Open the store on rank 0: on the address by which the others know it, if this machine can tell."""
    require_patch("store-token", "The store of ranks that start without MPI and without horovodrun")
    own = _own_address(environment, settings)
    served_by = StoreProcess(own, settings)
    address = own or LOOPBACK
    return _Found(address, served_by.port, _interface(own or _address_of_others(environment)), served_by)


def _own_address(environment: Environment, settings: Settings) -> str:
    """Return the address of this host that the others will use; "" where it cannot be told from here.

    Debian gives a host's own name an address of the loopback interface, and a cluster's DNS the right one.
    """
    if settings.host is None and len(environment.hosts) == 1:
        return LOOPBACK
    try:
        address = resolve(settings.host or environment.hosts[0])
    except OSError:
        return ""
    is_own = interface_of(address) is not None
    surely = settings.host is not None or not is_loopback(address)
    return address if is_own and surely else ""


def _address_of_others(environment: Environment) -> str:
    """Return the address of this host from which it reaches the others, or anybody."""
    for name in (*environment.hosts[1:2], "192.0.2.1"):  # the second belongs to nobody
        with contextlib.suppress(OSError):
            return address_towards(resolve(name))
    return LOOPBACK


def _find(environment: Environment, settings: Settings) -> _Found:
    host = settings.host or (LOOPBACK if len(environment.hosts) == 1 else environment.hosts[0])
    address, port = Caller(host, settings).find()
    return _Found(address, port, _interface(address_towards(address)))


def _interface(address: str) -> str:
    name = interface_of(address)
    if name is None:
        raise LaunchError(f"No interface of this machine has the address {address}. Set {_INTERFACE} to one of them.")
    return name


def _variables(environment: Environment, settings: Settings, found: _Found) -> dict[str, str]:
    """Return what `horovodrun` would set for this rank."""
    place = {
        "RANK": environment.rank,
        "SIZE": environment.size,
        "LOCAL_RANK": environment.local_rank,
        "LOCAL_SIZE": environment.local_size,
        "CROSS_RANK": environment.cross_rank,
        "CROSS_SIZE": environment.cross_size,
        "HOSTNAME": environment.hostname,
        "GLOO_RENDEZVOUS_PORT": found.port,
        "CONTROLLER": "gloo",
        "CPU_OPERATIONS": "gloo",
    }
    return {f"HOROVOD_{name}": str(value) for name, value in place.items()} | {
        _ADDRESS: f"{found.address}:{found.port}/{settings.token}",
        STARTER_VARIABLE: environment.launcher,
    }
