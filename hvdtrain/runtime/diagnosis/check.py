"""The outcome of one check."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """What was looked at, what was found, and what mends it."""

    name: str
    status: Status
    detail: str
    """What was found, in a line or a few."""
    fix: str = ""
    """The command or the step that mends it; empty where nothing is to be mended."""


def ok(name: str, detail: str) -> Check:
    """Return a check that found what it should."""
    return Check(name, "ok", detail)


def warning(name: str, detail: str, fix: str) -> Check:
    """Return a check that found something that training can do without."""
    return Check(name, "warning", detail, fix)


def failed(name: str, detail: str, fix: str) -> Check:
    """Return a check that found something that keeps training from running as documented."""
    return Check(name, "failed", detail, fix)
