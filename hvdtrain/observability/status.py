"""status.json: what a run is and how it stands, for those who look at its folder from elsewhere."""

import json
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hvdtrain.observability.events import BaseObserver, RunInfo
from hvdtrain.observability.summary import json_safe, write_json

State = Literal["running", "finished", "stopped", "failed"]
MOST_CHARACTERS = 500


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The contents of `status.json`."""

    state: State
    began: float
    """When the training began or went on, in seconds since 1970: another value is another start."""
    host: str
    """Of the primary."""
    process: int
    """The primary's number there."""
    info: RunInfo
    elastic: bool = False
    """Whether it may go on without its primary."""
    error: str = ""
    """What a failed run ended with: the first line."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as it is written."""
        kept = {name: value for name, value in asdict(replace(self.info, wording=str)).items() if name != "wording"}
        options = {name: _plain(value) for name, value in self.info.options.items()}
        own = {name: value for name, value in vars(self).items() if name != "info"}
        return {**own, "info": {**kept, "options": options, "run_dir": None}}

    @classmethod
    def read(cls, path: Path) -> "RunStatus | None":
        """Return what is written in `path`; None where nothing is, or nothing that this version knows."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            known = {field.name for field in fields(RunInfo)}
            info = {name: value for name, value in values["info"].items() if name in known}
            own = {name: values[name] for name in ("state", "began", "host", "process", "elastic", "error")}
            return cls(info=RunInfo(**{**info, "run_dir": path.parent}), **own)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


class StatusWriter(BaseObserver):
    """Writes `status.json` at the start of a run and at its end; a disk without room is passed over."""

    def __init__(self, path: Path, *, elastic: bool = False) -> None:
        self._path = path
        self._elastic = elastic
        self._status: RunStatus | None = None

    @property
    def output(self) -> str:
        """See `Observer`."""
        return str(self._path)

    def on_start(self, info: RunInfo) -> None:
        """Write what the run is."""
        self._write(
            RunStatus(
                state="running",
                began=time.time(),
                host=socket.gethostname(),
                process=os.getpid(),
                info=info,
                elastic=self._elastic,
            )
        )

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Write that it is finished."""
        self.ended("finished")

    def ended(self, state: State, error: str = "") -> None:
        """Write how the run ended, unless that is written."""
        if self._status is not None and self._status.state == "running":
            self._write(replace(self._status, state=state, error=error.partition("\n")[0][:MOST_CHARACTERS]))

    def _write(self, status: RunStatus) -> None:
        self._status = status
        with suppress(OSError):
            write_json(self._path, status.as_dict())


def cause_of(error: BaseException, reported: Mapping[int, str]) -> str:
    """Return in a line what a run failed with.

    Args:
        error: this rank's.
        reported: what other ranks have reported, by rank: theirs came first.
    """
    own = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
    for rank, text in sorted(reported.items()):
        own = f"rank {rank}: " + next((line for line in text.splitlines() if not line.startswith(_FRAMES)), "")
        break
    return own.strip().partition("\n")[0]


_FRAMES = (" ", "Traceback")


def _plain(value: Any) -> Any:
    """Return a value of an option as JSON, or in words."""
    try:
        return json_safe(value)
    except TypeError:
        return str(value)
