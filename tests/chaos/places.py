"""Where a training runs: here, on a small disk, or on hosts that come and go."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.launching import launcher

DISK_MB = 24


class NotPossible(Exception):
    """This machine cannot do what a fault needs; the message says why."""


@dataclass(frozen=True)
class Place:
    """The machine itself."""

    def launcher(self, controller: str, size: int) -> list[str]:
        """Return the words that start `size` ranks."""
        return launcher(controller, size)

    def strike(self, rank: int) -> None:
        """Take away what the fault is about."""

    def mend(self) -> None:
        """Give it back."""


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
