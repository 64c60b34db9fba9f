"""Where the results of a verb go: standard output, or a file that appears when it is whole."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hvdtrain.config.errors import ConfigError


class Output:
    """Writes lines until the reader of a pipe has gone; what follows is dropped."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> None:
        """Write `text` and flush it."""
        if self._gone:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            self._gone = True
            # Keep Python from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


@contextmanager
def opened_output(out: Path | None) -> Iterator[Output]:
    """Yield the output: standard output for None, else a file that appears when all is written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if out is None:
        yield Output(sys.stdout)
        return
    if out == Path(os.devnull):
        with out.open("w", encoding="utf-8") as nothing:
            yield Output(nothing)
        return
    draft = out.with_name(f".{out.name}.{os.getpid()}.draft")
    try:
        with _created(draft, out) as file:
            yield Output(file)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)


def _created(draft: Path, out: Path) -> TextIO:
    try:
        return draft.open("w", encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from None
