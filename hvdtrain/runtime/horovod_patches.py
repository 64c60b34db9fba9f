"""The patches that setup builds Horovod with (docs/horovod.md), and those of the Horovod that is installed."""

import hashlib
import importlib.metadata
import importlib.util
import runpy
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.logs import warn_on_first

HOROVOD = "0.28.1"
"""Release of Horovod that setup builds; there is no later one."""

RECORD = "patches.py"
"""Module of a patched Horovod that lists its patches."""

_SERIES = Path(__file__).parent.parent / "installation" / "patches"
_BEGIN = b"\ndiff --git "
_NAMED = 5
"""Patches that a message names, at most."""


def series() -> list[Path]:
    """Return the files of the patches, in the order in which they are applied."""
    return sorted(_SERIES.glob("*.patch"))


def series_hashes() -> dict[str, str]:
    """Return the beginning of the SHA-256 of each patch's diff, by name; its header may be reworded."""
    diffs = {path.stem: path.read_bytes().partition(_BEGIN)[2] for path in series()}
    return {name: hashlib.sha256(diff).hexdigest()[:12] for name, diff in diffs.items()}


def patched_version() -> str:
    """Return the version of Horovod with this series of patches."""
    return f"{HOROVOD}+hvdtrain.{len(series())}"


def installed_hashes() -> dict[str, str] | None:
    """Return what `series_hashes` was for the installed Horovod, without importing it; None if there is none."""
    found = importlib.util.find_spec("horovod")
    if found is None or found.origin is None:
        return None
    record = Path(found.origin).with_name(RECORD)
    return dict(runpy.run_path(str(record))["PATCHES"]) if record.exists() else {}


def difference(installed: Mapping[str, str]) -> str | None:
    """Return how the patches of an installed Horovod differ from this series; None if they don't."""
    wanted = series_hashes()
    if installed == wanted:
        return None
    missing = [name for name in wanted if name not in installed]
    other = [name for name in wanted if name in installed and installed[name] != wanted[name]]
    extra = [name for name in installed if name not in wanted]
    found = {"lacks": missing, "has another version of": other, "has, besides,": extra}
    return ", ".join(f"{verb} {_named(names)}" for verb, names in found.items() if names)


def warn_if_unpatched() -> None:
    """Warn on the first rank if the installed Horovod was built without this series of patches."""
    installed = installed_hashes()
    how = None if installed is None else difference(installed)
    if how is not None:
        version = importlib.metadata.version("horovod")
        warn_on_first(
            f"Of the patches that hvdtrain needs, Horovod {version} {how} (docs/horovod.md says what each is for). "
            "Run: python -m hvdtrain setup",
            stacklevel=2,
        )


def require_patch(name: str, what: str) -> None:
    """Refuse a Horovod without one of the patches.

    Args:
        what: needs it.

    Raises:
        LaunchError: names the version, the patch and how to get it.
    """
    if not any(installed.partition("-")[2] == name for installed in installed_hashes() or {}):
        raise LaunchError(
            f"{what} needs Horovod with the patch {name} (docs/horovod.md). Received: Horovod "
            f"{importlib.metadata.version('horovod')} without it. Run: python -m hvdtrain setup"
        )


def _named(names: list[str]) -> str:
    if len(names) <= _NAMED:
        return f"{len(names)} ({', '.join(names)})" if len(names) > 1 else names[0]
    return f"{len(names)} ({names[0]} to {names[-1]})"
