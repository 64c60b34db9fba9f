"""A finding about one line of a script."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["works as is", "works with the import changed", "needs this change"]


@dataclass(frozen=True)
class Finding:
    """A use of Horovod in a script, with its verdict."""

    line: int
    what: str
    """The call or the import."""
    verdict: Verdict
    advice: str = ""
    """The manual change; empty if none is needed."""
