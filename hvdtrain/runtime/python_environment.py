"""The Python environment that this process runs in: where it is, what is installed, how it is activated."""

import importlib
import os
import shlex
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import Distribution
from pathlib import Path


@dataclass(frozen=True)
class PythonEnvironment:
    """A venv, a conda environment, or the folders of a Python that has none."""

    prefix: Path
    """The environment's folder."""
    python: Path
    """Its interpreter."""
    scripts: Path
    """The folder of its commands, horovodrun among them."""
    packages: Path
    """The folder that pip installs to."""
    search: Sequence[str] = field(default_factory=lambda: sys.path)
    """Folders that are searched for installed packages."""
    managed: bool = False
    """Whether it belongs to the operating system's package manager (PEP 668)."""

    @classmethod
    def active(cls) -> "PythonEnvironment":
        """Return the environment of this process."""
        marker = Path(sysconfig.get_path("stdlib"), "EXTERNALLY-MANAGED")
        return cls(
            Path(sys.prefix),
            Path(sys.executable),
            Path(sysconfig.get_path("scripts")),
            Path(sysconfig.get_path("purelib")),
            managed=sys.prefix == sys.base_prefix and marker.exists(),
        )

    @property
    def notes(self) -> Path:
        """Folder of what setup keeps in the environment: what it installed, and its logs."""
        return self.prefix / "hvdtrain"

    def distribution(self, name: str) -> Distribution | None:
        """Return the installed distribution `name`, or None."""
        importlib.invalidate_caches()
        return next(iter(Distribution.discover(name=name, path=list(self.search))), None)

    def version(self, *names: str) -> str | None:
        """Return the version of the first of `names` that is installed, or None."""
        found = (self.distribution(name) for name in names)
        return next((distribution.version for distribution in found if distribution), None)

    def activation(self) -> str | None:
        """Return the command that activates it in a shell; None if there is none."""
        if (self.prefix / "conda-meta").is_dir():
            return f"conda activate {shlex.quote(str(self.prefix))}"
        script = self.scripts / "activate"
        return f"source {shlex.quote(str(script))}" if script.exists() else None

    def path_first(self, path: str) -> str:
        """Return `path` with the environment's commands first, as activating it does."""
        others = [folder for folder in path.split(os.pathsep) if folder != str(self.scripts)]
        return os.pathsep.join([str(self.scripts), *others])


def activate() -> str:
    """Return the command that activates this process's environment, or words for it."""
    return PythonEnvironment.active().activation() or "put the environment's bin folder on PATH"
