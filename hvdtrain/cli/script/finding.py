"""A finding about one line of a script."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["works as is", "works with the import changed", "change this import", "needs this change"]


@dataclass(frozen=True)
class Finding:
    """A use of Horovod, TensorFlow or Keras in a script, with its verdict."""

    line: int
    what: str
    """The use, as the script spells it."""
    verdict: Verdict
    advice: str = ""
    """The change; empty if none is needed."""
    ends_with_keras_2: bool = False
    """Whether the change is not needed with tf_keras."""

    @property
    def needs_action(self) -> bool:
        """Whether the script has to change here."""
        return self.verdict in ("change this import", "needs this change")


@dataclass(frozen=True)
class Replacement:
    """A replacement of the text between two positions of a script (lines from 1, columns in UTF-8 bytes from 0)."""

    line: int
    begin: int
    end_line: int
    end: int
    text: str
