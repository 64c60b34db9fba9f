"""Network interfaces of this host, of Open MPI's ranks, and the addresses of all ranks."""

import contextlib
import ipaddress
import os
import socket
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path

import psutil


def interface_by_address() -> dict[str, str]:
    """Return the name of the interface for each IPv4 and IPv6 address of this host."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        each.address.partition("%")[0]: name  # a link-local one is followed by the interface
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if each.family in families
    }


def own_addresses() -> dict[str, str]:
    """Return what `interface_by_address` does, without the addresses of the loopback."""
    found = interface_by_address().items()
    return {address: name for address, name in found if not ipaddress.ip_address(address).is_loopback}


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


_INCLUDE, _EXCLUDE = (f"OMPI_MCA_btl_tcp_if_{which}" for which in ("include", "exclude"))
_BRIDGES = ("docker", "br-", "virbr", "cni", "podman", "nerdctl", "lxcbr", "lxdbr", "flannel", "cali")
"""How the names of interfaces begin that lead to containers and virtual machines of this host alone."""
_ITS_DEFAULT = ("127.0.0.1/8", "sppp")


def leave_out_bridges(
    environ: MutableMapping[str, str], names: Iterable[str] | None = None, files: Iterable[Path] | None = None
) -> None:
    """Keep the ranks of `mpirun` off the bridges of Docker and the like, unless the user has chosen interfaces.

    Each host has a `docker0` of its own with the same address. Open MPI takes them for one network: ranks connect to
    themselves, and wait for ever.

    Args:
        names: of this host's interfaces; None: those that it has.
        files: Open MPI's files of settings; None: those that it reads.
    """
    present = [name for _, name in socket.if_nameindex()] if names is None else names
    if files is None:
        prefixes = [Path(sys.prefix, "etc"), Path("/etc/openmpi")]
        prefixes += [Path(os.environ["OPAL_PREFIX"], "etc")] if os.environ.get("OPAL_PREFIX") else []
        files = [Path.home() / ".openmpi" / "mca-params.conf", *(each / "openmpi-mca-params.conf" for each in prefixes)]
    chosen = bool({_INCLUDE, _EXCLUDE} & environ.keys())
    for file in files:
        with contextlib.suppress(OSError):  # Open MPI refuses both a list of those to use and of those not to
            lines = file.read_text(errors="replace").splitlines()
            chosen = chosen or any(line.strip().startswith("btl_tcp_if_") for line in lines)
    bridges = sorted(name for name in present if name.startswith(_BRIDGES))
    if bridges and not chosen:
        environ[_EXCLUDE] = ",".join([*_ITS_DEFAULT, *bridges])
