"""logs/rank-N.log: what each rank of a run writes to its standard streams."""

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.output.fetching import LogFetcher
from hvdtrain.runtime.output.rank_output import STREAMS
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.terminal import on_terminal, say

TIMEOUT_S = 600.0
ERRORS_ONLY = (2,)
"""Of a rank with a live display, which moves the cursor; which is no text to keep."""


@contextmanager
def rank_logs(session: Session, folder: RunFolder, begun: int) -> Iterator[TextIO | None]:
    """Copy what this rank writes into the run's folder, until the process ends; every rank calls it.

    Where a rank cannot see the folder, its file is a temporary one, and fetched: every few seconds, and at the end of
    this context. A file that cannot be written is a warning. Yields, to a rank with a live display, the file for what
    the display is to say in lines: its own output moves the cursor.

    Args:
        session: this rank's part in the job.
        folder: of the run, which exists on the primary's host.
        begun: finished steps.
    """
    shared, by_all = _who_sees(folder, session)
    home = folder.logs if shared else Path(tempfile.mkdtemp(prefix="hvdtrain-logs-"))
    live = on_terminal(session.environment)
    file = _start(session, home, begun, ERRORS_ONLY if live else STREAMS)
    with ExitStack() as closing:
        if not shared:
            closing.callback(shutil.rmtree, home, ignore_errors=True)
        lines = closing.enter_context(file.open("a", encoding="utf-8")) if live and file is not None else None
        if by_all:
            yield lines
        else:
            with _fetched(session, None if shared else file, folder):
                yield lines


@contextmanager
def _fetched(session: Session, sends: Path | None, folder: RunFolder) -> Iterator[None]:
    """Bring the files of other hosts to the primary within this context, and at its end; every rank calls it."""
    fetcher = LogFetcher(session.control, sends, folder.logs if session.world.primary else None)
    session.link.watchdog.add(fetcher)
    try:
        yield
        fetcher.finish()
    except BaseException:
        fetcher.exchange_tails()
        raise


def _who_sees(folder: RunFolder, session: Session) -> tuple[bool, bool]:
    """Tell whether this rank sees the primary's folder, and whether all ranks do."""
    control, primary = session.control, session.world.primary
    place, mark = folder.logs / ".shared", secrets.token_hex(8).encode() if primary else b""
    if primary:
        with contextlib.suppress(OSError):
            folder.logs.mkdir(exist_ok=True)
            place.write_bytes(mark)
    mark = control.exchange(mark, timeout=TIMEOUT_S)[0]
    sees = primary or _holds(place, mark)
    by_all = all(control.exchange(b"1" if sees else b"", timeout=TIMEOUT_S))
    if primary:
        with contextlib.suppress(OSError):
            place.unlink()
    return sees, by_all


def _start(session: Session, home: Path, begun: int, streams: tuple[int, ...]) -> Path | None:
    environment = session.environment
    file = home / f"rank-{environment.rank}.log"
    heading = f"rank {environment.rank} of {environment.size} on {environment.hostname}, after step {begun}"
    try:
        session.link.output.start(file, heading, streams=streams)
    except OSError as error:
        say(f"hvdtrain: warning: {file} cannot be written: {error.strerror}. The run goes on without it.")
        return None
    return file


def _holds(file: Path, mark: bytes) -> bool:
    with contextlib.suppress(OSError):
        return file.read_bytes() == mark
    return False
