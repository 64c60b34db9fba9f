"""Addresses and interfaces of this machine, as the other ranks see them. IPv4: Horovod knows no other."""

import ipaddress
import socket

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.interfaces import interfaces


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
