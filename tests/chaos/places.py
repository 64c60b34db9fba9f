"""Where a training runs: here, on a small disk, or on hosts whose links can be cut."""

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.launching import launcher

DISK_MB = 24
_SSH = Path(__file__).parent / "scripts" / "ssh_to_namespace.py"
_NET = "10.213.77"
_MPIRUN_NOTICES = [
    word
    for name, value in {"time": 5, "intvl": 2, "probes": 3}.items()
    for word in ("--mca", f"oob_tcp_keepalive_{name}", str(value))
]
"""mpirun takes notice of a host that is gone after 11 s; after 8 minutes by default."""
_RETRIES = 3
"""How often its system sends a message again: for 3 s, and by default for a quarter of an hour."""
_OF_NAMESPACES = Path("/etc/netns")


class NotPossible(Exception):
    """This machine cannot do what a fault needs; the message says why."""


@dataclass(frozen=True)
class Place:
    """The machine itself."""

    environ: dict[str, str] = field(default_factory=dict)

    def launcher(self, controller: str, size: int) -> list[str]:
        """Return the words that start `size` ranks."""
        return launcher(controller, size)

    def strike(self, rank: int) -> None:
        """Take away what the fault is about."""

    def mend(self) -> None:
        """Give it back."""

    def mistakes(self, controller: str, rank: int) -> list[str]:
        """Return what a rank did wrong that was struck, as far as it can be seen here alone."""
        return []


@dataclass(frozen=True)
class SmallDisk(Place):
    """A folder on a disk of its own, which `strike` fills."""

    folder: Path = Path()

    def strike(self, rank: int) -> None:
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb", buffering=0) as filler:
            while filler.write(bytes(2**16)):
                pass

    def mend(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)


@dataclass(frozen=True)
class Hosts(Place):
    """A host for the launcher, and one for each rank, joined by a bridge."""

    names: tuple[str, ...] = ()
    folder: Path = Path()
    """Where the hosts leave the lines that could not be passed on, and how their commands have ended."""

    def launcher(self, controller: str, size: int) -> list[str]:
        """Return the words that start one rank on each host."""
        hosts = ",".join(f"{address(number)}:1" for number in range(1, size + 1))
        words = launcher(controller, size)
        if controller == "mpirun":
            where = ["--mca", "plm_rsh_agent", "ssh", "--mca", "btl_tcp_if_include", "eth0"]
            where += ["--mca", "oob_tcp_if_include", "eth0", "--host", hosts, *_MPIRUN_NOTICES]
            where += ["--output-filename", str(self.folder / "ranks")]
        else:
            where = ["-H", hosts, "--network-interfaces", "eth0"]
        return [*inside(self.names[0], "host0"), *words[:1], *where, *words[1:]]

    def strike(self, rank: int) -> None:
        _ip("link", "set", _link(self.names[rank + 1]), "down")

    def mend(self) -> None:
        for name in self.names:
            _ip("link", "set", _link(name), "up")

    def mistakes(self, controller: str, rank: int) -> list[str]:
        """See `Place.mistakes`: the rank behind the link said why it ended, and with the code of a hang."""
        by_mpirun = controller == "mpirun"
        said = self.folder / (f"ranks/1/rank.{rank}/stderr" if by_mpirun else f"host{rank + 1}.unheard")
        text = said.read_text() if said.exists() else ""
        found = [] if "error: The job hangs" in text else [f"rank {rank}, which was cut off, said: {text[-2000:]!r}"]
        code = "124" if by_mpirun else (self.folder / f"host{rank + 1}.code").read_text()  # mpirun's is not the rank's
        return found if code == "124" else [*found, f"rank {rank}, which was cut off, ended with code {code}"]


@dataclass(frozen=True)
class DiscoveredHosts(Place):
    """Names of this machine that a host discovery script prints."""

    folder: Path = Path()
    most: int = 2
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Those that are there once the hosts have changed."""

    def launcher(self, controller: str, size: int) -> list[str]:
        sizes = ["--min-np", "1", "--max-np", str(self.most), "--network-interfaces", "lo"]
        return [*launcher("gloo", size), *sizes, "--host-discovery-script", str(self.folder / "discover.sh")]

    def strike(self, rank: int) -> None:
        self._discover([*self.after[:rank], *self.after[rank + 1 :]] if self.after == self.before else self.after)

    def mend(self) -> None:
        self._discover(self.before)

    def _discover(self, names: Sequence[str]) -> None:
        """Replace the script at once: it may be run at any time."""
        draft = self.folder / "discover.draft"
        draft.write_text("#!/bin/sh\n" + "".join(f"echo {name}:1\n" for name in names))
        draft.chmod(0o755)
        draft.rename(self.folder / "discover.sh")


_NAMES = ("localhost", "127.0.0.1", "127.1")


def discovered_hosts(folder: Path, fault: str, *, spare: bool) -> DiscoveredHosts:
    """Return two hosts of an elastic job, to which one is added or of which one is removed by `strike`.

    Args:
        folder: where the discovery script is kept.
        fault: what happens to them.
        spare: whether there is a third one, which takes the place of one whose rank is lost.
    """
    two = _NAMES[:2]
    hosts = {
        "host-added": DiscoveredHosts(folder=folder, most=3, before=two, after=_NAMES),
        "host-removed": DiscoveredHosts(folder=folder, before=two, after=two),
    }
    usual = _NAMES if spare else two
    place = hosts.get(fault, DiscoveredHosts(folder=folder, before=usual, after=usual))
    place.mend()
    return place


def address(number: int) -> str:
    """Return the address of a host: the launcher's is 0."""
    return f"{_NET}.{number + 1}"


def inside(namespace: str, hostname: str) -> list[str]:
    """Return the words before a command that run it on a host."""
    named = f'hostname {hostname}; exec "$@"'
    return ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", named, "_"]


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """Context in which `folder` is a small file system in memory.

    Raises:
        NotPossible: this user or machine cannot mount one.
    """
    folder.mkdir(parents=True)
    _run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "chaos", str(folder)])
    try:
        yield SmallDisk(folder=folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=False)


@contextlib.contextmanager
def hosts(number: int, folder: Path) -> Iterator[Hosts]:
    """Context with a host for a launcher and `number` for ranks, which share this machine's files.

    Raises:
        NotPossible: this user or machine cannot make network namespaces.
    """
    mark = uuid.uuid4().hex[:6]  # a link with processes behind it may stay for a while
    bridge, names = f"cb{mark}", tuple(f"c{mark}n{each}" for each in range(number + 1))
    bin_folder = folder / "bin"
    bin_folder.mkdir(parents=True)
    ssh = bin_folder / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec {sys.executable} {_SSH} {folder} {",".join(names)} "$@"\n')
    ssh.chmod(0o755)
    search = os.pathsep.join([str(bin_folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for each, name in enumerate(names):
            _add_host(name, address(each), bridge)
            _tell_addresses(name, number)
        _run(["ip", "netns", "exec", names[0], "sysctl", "-qw", f"net.ipv4.tcp_retries2={_RETRIES}"])
        yield Hosts({"PATH": search}, names, folder)
    finally:
        for name in names:
            for words in (["link", "del", _link(name)], ["netns", "del", name]):
                subprocess.run(["ip", *words], check=False, stderr=subprocess.DEVNULL)
            shutil.rmtree(_OF_NAMESPACES / name, ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], check=False, stderr=subprocess.DEVNULL)


def _add_host(name: str, address: str, bridge: str) -> None:
    _ip("netns", "add", name)
    _ip("link", "add", _link(name), "type", "veth", "peer", "name", "eth0", "netns", name)
    _ip("link", "set", _link(name), "master", bridge, "up")
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")


def _tell_addresses(name: str, number: int) -> None:
    """Have the hosts' names looked up in a file of their own, which `ip netns exec` puts in the place of the usual."""
    lines = ["127.0.0.1 localhost", *(f"{address(each)} host{each}" for each in range(number + 1))]
    (_OF_NAMESPACES / name).mkdir(parents=True)
    (_OF_NAMESPACES / name / "hosts").write_text("\n".join(lines) + "\n")


def _link(name: str) -> str:
    return f"v{name}"


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(command: list[str]) -> None:
    """Run a command of the system's.

    Raises:
        NotPossible: it is not there, or fails.
    """
    if shutil.which(command[0]) is None:
        raise NotPossible(f"there is no {command[0]!r}")
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise NotPossible(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
