"""Following a run from its folder: from another terminal, or from another host that sees the folder."""

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hvdtrain.checkpoint import lock
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, StepRecord
from hvdtrain.observability.jsonl import parsed_lines
from hvdtrain.observability.status import RunStatus
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runtime.file_lock import is_locked

Seen = Literal["none", "running", "finished", "stopped", "failed", "died"]
"""What becomes of a run, as its folder shows it: `died` of one that ended without a word."""


class RunFollower:
    """Shows what a run's folder tells to an observer, record by record, as it grows.

    Args:
        path: the run's folder; it need not exist yet.
        show: receives the facts about the run and its records; those of a run that went on from a checkpoint begin
            anew.
    """

    def __init__(self, path: Path, show: Observer) -> None:
        self._folder = RunFolder(path)
        self._show = show
        self._status: RunStatus | None = None
        self._step = 0
        self._file: tuple[int, int] = (0, 0)
        """Of metrics.jsonl: its number in the file system, and how far it was read."""

    @property
    def status(self) -> RunStatus | None:
        """What the run said last of itself; None before it has begun."""
        return self._status

    @property
    def step(self) -> int:
        """The last step that was recorded."""
        return self._step

    def look(self) -> Seen:
        """Show what is new, and return how the run stands."""
        alive = is_written_to(self._folder.path)
        status = RunStatus.read(self._folder.status)
        if status is None:
            return "none"
        if self._status is None or self._status.began != status.began:
            self._begin(status)
        self._status = status
        for record in self._new_records():
            self._show_record(record)
        self._show.on_progress(self._step)
        if status.state != "running":
            return status.state
        return "running" if alive is True or (alive is None and _process_lives(status)) else "died"

    def _begin(self, status: RunStatus) -> None:
        self._step = max(status.info.start_step, 0)
        self._file = (0, 0)
        self._show.on_start(status.info)

    def _new_records(self) -> Iterator[Mapping[str, Any]]:
        try:
            with self._folder.metrics.open("rb") as stream:
                number = os.fstat(stream.fileno()).st_ino
                begin = self._file[1] if self._file[0] == number else 0
                stream.seek(begin)
                text = stream.read()
        except OSError:
            return
        whole = text[: text.rfind(b"\n") + 1]
        self._file = number, begin + len(whole)
        lines = whole.decode("utf-8", errors="replace").splitlines()
        yield from parsed_lines(self._folder.metrics, lines)

    def _show_record(self, record: Mapping[str, Any]) -> None:
        kind, step, epoch = record["kind"], record["step"], record.get("epoch", 0)
        begun = self._status.info.start_step if self._status is not None else 0
        if step < self._step or step <= begun:
            return
        self._step = step
        figures = {name: value for name, value in record.items() if name not in ("kind", "step", "epoch")}
        if kind == "step":
            self._show.on_progress(step)
            self._show.on_step(_record(StepRecord, step, epoch, figures))
        elif kind == "evaluation":
            self._show.on_evaluation(_record(EvaluationRecord, step, epoch, figures))
        elif kind == "epoch":
            self._show.on_epoch(EpochRecord(step, epoch, figures))


def _record(kind: type[Any], step: int, epoch: int, figures: Mapping[str, Any]) -> Any:
    """Return a record from its flat form."""
    own = {field.name for field in fields(kind)} & figures.keys()
    metrics = {name.removeprefix("metric_"): value for name, value in figures.items() if name not in own}
    return kind(
        step=step, epoch=epoch, **{"loss": None, **{name: figures[name] for name in own}}, metrics=_numbers(metrics)
    )


def _numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics as records hold them: one value for each class as an array."""
    return {name: np.asarray(value) if isinstance(value, list) else value for name, value in metrics.items()}


def is_written_to(folder: Path) -> bool | None:
    """Tell whether a job holds the lock on `folder`, without touching it; None where nothing can be told.

    The answer holds for jobs on other hosts that share the folder, where its file system does.
    """
    try:
        descriptor = os.open(folder / lock.NAME, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        return is_locked(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _process_lives(status: RunStatus) -> bool:
    """Tell whether the primary is there, as far as that can be seen from this host: elsewhere it is taken to be."""
    if status.host != socket.gethostname():
        return True
    with suppress(ProcessLookupError, PermissionError):
        os.kill(status.process, 0)
        return True
    return Path(f"/proc/{status.process}").exists()


def read_summary(path: Path) -> Mapping[str, Any]:
    """Return the results in a run's folder; none where they cannot be read."""
    try:
        found = json.loads(RunFolder(path).summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
