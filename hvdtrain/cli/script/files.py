"""The scripts and notebooks among the paths of a command line."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from hvdtrain.config.errors import ConfigError

ENDINGS = (".py", ".ipynb")
_NOT_THE_USERS = {"__pycache__", "node_modules", "site-packages"}
_MARKS_OF_ENVIRONMENTS = ("pyvenv.cfg", "conda-meta")


def scripts_under(paths: Sequence[Path]) -> list[Path]:
    """Return the files among `paths` and the scripts in the folders among them, each once, sorted.

    Folders are read with all below them, but for hidden ones, caches and Python environments.

    Raises:
        ConfigError: a path does not exist, or a folder has no script.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        for script in _scripts_of(path):
            found.setdefault(script.resolve(), script)
    return sorted(found.values())


def _scripts_of(path: Path) -> list[Path]:
    if not path.is_dir():
        if not path.exists():
            raise ConfigError(f"--script {path}: No such file or directory.")
        return [path]
    scripts = list(_walk(path))
    if not scripts:
        raise ConfigError(f"--script {path}: the folder has no Python script (.py) and no notebook (.ipynb).")
    return scripts


def _walk(folder: Path) -> Iterator[Path]:
    for where, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if _is_the_users(Path(where, name)))
        yield from (Path(where, name) for name in sorted(files) if name.endswith(ENDINGS) and name[0] != ".")


def _is_the_users(folder: Path) -> bool:
    """Whether a folder may hold scripts of the user's own."""
    if folder.name.startswith(".") or folder.name in _NOT_THE_USERS or folder.name.endswith(".egg-info"):
        return False
    return not any((folder / mark).exists() for mark in _MARKS_OF_ENVIRONMENTS)
