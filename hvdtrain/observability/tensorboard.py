"""TensorBoard event files."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.observability.events import EvaluationRecord, Observer, StepRecord
from hvdtrain.observability.jsonl import flat_record

_NO_CURVE = {"kind", "step", "epoch"}


class TensorBoardWriter(Observer):
    """Writes the curves of a run to ``folder/train`` and ``folder/validation``.

    Training and validation values share tags, so that TensorBoard draws them in one chart. TensorFlow is imported with
    the first record. A resumed run adds an event file; repeated steps are drawn twice. A folder that was removed is
    made again.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def on_step(self, record: StepRecord) -> None:
        """Write loss, learning rate, speed, training metrics and, if measured, the gradient norm."""
        self._write("train", record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Write validation loss and metrics, and flush."""
        self._write("validation", record)
        with self._files_errors():
            for writer in self._writers.values():
                writer.flush()

    def close(self) -> None:
        """Close the event files."""
        with self._files_errors():
            for writer in self._writers.values():
                writer.close()

    def _write(self, run: str, record: StepRecord | EvaluationRecord) -> None:
        import tensorflow as tf

        with self._files_errors():
            if run not in self._writers or not (self._folder / run).is_dir():
                self._writers[run] = tf.summary.create_file_writer(str(self._folder / run))
            with self._writers[run].as_default(record.step):
                for tag, value in flat_record(run, record).items():
                    for curve, each in curves_of(tag, value).items():
                        tf.summary.scalar(curve, each)

    @contextmanager
    def _files_errors(self) -> Iterator[None]:
        """Raise TensorFlow's errors as those of files."""
        import tensorflow as tf

        try:
            yield
        except tf.errors.OpError as error:
            raise OSError(errno.EIO, f"{self._folder} cannot be written: {error.message}") from error


def curves_of(tag: str, value: Any) -> dict[str, Any]:
    """Return the values to draw by tag: a metric with several values has a curve for each, numbered from 0."""
    if value is None or tag in _NO_CURVE:
        return {}
    values = np.asarray(value)
    if values.ndim == 0:
        return {tag: value}
    return {f"{tag}/{number}": each for number, each in enumerate(values.reshape(-1))}
