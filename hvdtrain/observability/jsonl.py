"""metrics.jsonl: one JSON object for each logged step, each evaluation and each epoch."""

import errno
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from io import FileIO
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import DataError
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, RunInfo, StepRecord
from hvdtrain.observability.summary import json_safe, replace_file
from hvdtrain.runtime.logs import LOGGER


class JsonlWriter(Observer):
    """Writes each record as a line, at once and whole.

    Where a line cannot be written, as on a full disk, it is left out with a warning: training goes on. A file that was
    removed is written anew.

    A resumed run appends to the file, after dropping records past the step it resumes from, since those steps are taken
    again. A run from step 0 overwrites the file.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: FileIO | None = None
        self._warned = False

    @property
    def output(self) -> str:
        return str(self._path)

    def on_start(self, info: RunInfo) -> None:
        """Open the file, keeping its records up to the step that this run resumes from."""
        kept = read_metrics(self._path) if info.start_step and self._path.exists() else []
        kept = [record for record in kept if record["step"] <= info.start_step]
        replace_file(self._path, "".join(map(_line, kept)))
        self._file = self._path.open("ab", buffering=0)

    def on_step(self, record: StepRecord) -> None:
        self._write(flat_record("step", record))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._write(flat_record("evaluation", record))

    def on_epoch(self, record: EpochRecord) -> None:
        self._write({"kind": "epoch", "step": record.step, "epoch": record.epoch} | dict(record.figures))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            file = self._file_at_its_place()
            line, end = _line(record).encode(), file.seek(0, os.SEEK_END)
            try:
                if file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                with suppress(OSError):
                    file.truncate(end)
                raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                why = f"{self._path} cannot be written: {error.strerror}"
                LOGGER.warning(f"{why}. Records are missing from it, and training goes on.")

    def _file_at_its_place(self) -> FileIO:
        """Return the open file, or a new one if it was removed.

        Raises:
            OSError: it cannot be made, or another file has its name.
        """
        assert self._file is not None, "on_start opens the file"
        try:
            if os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno())):
                return self._file
        except FileNotFoundError:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            new = self._path.open("xb", buffering=0)
            self._file.close()
            self._file = new
            LOGGER.warning(f"{self._path} was removed. It is written anew, without the records from before.")
            return new
        raise OSError(errno.EEXIST, "another file is in its place")


def flat_record(kind: str, record: StepRecord | EvaluationRecord) -> dict[str, Any]:
    """Return `record` as a flat dict; a metric with the name of a field becomes ``metric_…``."""
    own = {"kind": kind} | {field.name: getattr(record, field.name) for field in fields(record)}
    metrics = own.pop("metrics")
    own.pop("so_far", None)
    if own["loss"] is None:
        del own["loss"]
    return own | {f"metric_{name}" if name in own else name: value for name, value in metrics.items()}


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Read a metrics.jsonl.

    An incomplete last line, as a killed process leaves it, is dropped. NaN and infinite values become None.

    Raises:
        DataError: any other line is not a JSON object.
    """
    *lines, _ = Path(path).read_text(encoding="utf-8", errors="replace").split("\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            record["kind"], record["step"]
        except (ValueError, TypeError, KeyError):
            raise DataError(f"{path}, line {number}: not a record of a training run: {line.strip()[:80]}") from None
        records.append(record)
    return records


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(json_safe(record), allow_nan=False) + "\n"
