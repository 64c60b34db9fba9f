"""The meeting of the ranks, after which each has the variables that lead Horovod and our channel to the store."""

import atexit
import contextlib
import os
import time
from collections.abc import MutableMapping
from dataclasses import dataclass

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.store import Store, open_store
from hvdtrain.runtime.horovod_patches import require_patch
from hvdtrain.runtime.launchers import STARTER_VARIABLE, Environment, detect_environment
from hvdtrain.runtime.rendezvous import network
from hvdtrain.runtime.rendezvous.caller import Caller
from hvdtrain.runtime.rendezvous.hello import COMPLETE, STATE
from hvdtrain.runtime.rendezvous.settings import Settings, read_settings
from hvdtrain.runtime.rendezvous.store_process import StoreProcess

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
        network.check_interface(environ[_INTERFACE])
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
        address = network.resolve(settings.host or environment.hosts[0])
    except OSError:
        return ""
    is_own = network.interface_of(address) is not None
    surely = settings.host is not None or not network.is_loopback(address)
    return address if is_own and surely else ""


def _address_of_others(environment: Environment) -> str:
    """Return the address of this host from which it reaches the others, or anybody."""
    for name in (*environment.hosts[1:2], "192.0.2.1"):  # the second belongs to nobody
        with contextlib.suppress(OSError):
            return network.address_towards(network.resolve(name))
    return LOOPBACK


def _find(environment: Environment, settings: Settings) -> _Found:
    host = settings.host or (LOOPBACK if len(environment.hosts) == 1 else environment.hosts[0])
    address, port = Caller(host, settings).find()
    return _Found(address, port, _interface(network.address_towards(address)))


def _interface(address: str) -> str:
    name = network.interface_of(address)
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
