"""The network interfaces of this host."""

import ipaddress
import socket
from collections import Counter
from collections.abc import Mapping, Sequence

import psutil


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the IPv4 addresses of each interface of this host."""
    every = psutil.net_if_addrs().items()
    return {name: tuple(each.address for each in found if each.family == socket.AF_INET) for name, found in every}


def own_addresses() -> dict[str, str]:
    """Return the name of the interface for each IPv4 and IPv6 address of this host, but for those of the loopback."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = {
        _plain(each.address): name
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in families
    }
    return {address: name for address, name in found.items() if not ipaddress.ip_address(address).is_loopback}


def candidates() -> str:
    """Return the interfaces of this host and their IPv4 addresses, for a message: "eth0 (10.0.0.1), ib0 (10.1.0.1)"."""
    found = [f"{name} ({address})" for address, name in own_addresses().items() if ":" not in address]
    return ", ".join(found) or "none but the loopback"


def hosts_by_address(addresses: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return the host that has each address, leaving out those that several have, such as that of Docker's bridge.

    Args:
        addresses: those of each host.
    """
    count = Counter(address for own in addresses.values() for address in set(own))
    return {address: host for host, own in addresses.items() for address in own if count[address] == 1}


def _plain(address: str) -> str:
    """Return an address without the interface that follows a link-local one."""
    return address.partition("%")[0]
