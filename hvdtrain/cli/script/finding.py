"""One line of what a script does with Horovod."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["works as is", "works with the import changed", "needs this change"]


@dataclass(frozen=True)
class Finding:
    """What stands in a line, and what becomes of it."""

    line: int
    what: str
    """The call or the import."""
    verdict: Verdict
    advice: str = ""
    """What to write instead; empty where nothing is to be done by hand."""
