"""The network interfaces that Open MPI's ranks speak over."""

import contextlib
import os
import socket
import sys
from collections.abc import Iterable, MutableMapping
from pathlib import Path

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
        environ: the environment, before MPI starts.
        names: of this host's interfaces; None: those that it has.
        files: Open MPI's files of settings; None: those that it reads.
    """
    present = [name for _, name in socket.if_nameindex()] if names is None else names
    bridges = sorted(name for name in present if name.startswith(_BRIDGES))
    chosen = {_INCLUDE, _EXCLUDE} & environ.keys()
    if bridges and not chosen and not any(map(_chooses, _files() if files is None else files)):
        environ[_EXCLUDE] = ",".join([*_ITS_DEFAULT, *bridges])


def _files() -> list[Path]:
    folders = [Path.home() / ".openmpi" / "mca-params.conf", Path(sys.prefix, "etc", "openmpi-mca-params.conf")]
    system = Path("/etc/openmpi/openmpi-mca-params.conf")
    prefix = os.environ.get("OPAL_PREFIX")
    return [*folders, system, *([Path(prefix, "etc", "openmpi-mca-params.conf")] if prefix else [])]


def _chooses(file: Path) -> bool:
    """Whether a file of settings names interfaces: Open MPI refuses both a list of those to use and of those not to."""
    with contextlib.suppress(OSError):
        return any(line.strip().startswith("btl_tcp_if_") for line in file.read_text(errors="replace").splitlines())
    return False
