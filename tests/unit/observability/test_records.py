"""The records of a run on disk: metrics.jsonl, summary.json, TensorBoard, and the observers' composite."""

import errno
import io
import json
import math
import os
import resource
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest

from hvdtrain.config.errors import DataError
from hvdtrain.observability.console import PlainConsole
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, Observers, StepRecord
from hvdtrain.observability.jsonl import JsonlWriter, read_metrics
from hvdtrain.observability.summary import write_json
from tests.builders import run_info


def step(number: int, loss: float = 0.5, **metrics: float) -> StepRecord:
    return StepRecord(
        step=number, epoch=(number - 1) // 23, loss=loss, learning_rate=1e-3, samples_per_second=1000.0, metrics=metrics
    )


def write(path: Path, *records: StepRecord | EvaluationRecord, start_step: int = 0) -> None:
    writer = JsonlWriter(path)
    writer.on_start(run_info(start_step=start_step))
    for record in records:
        (writer.on_step if isinstance(record, StepRecord) else writer.on_evaluation)(record)
    writer.close()


def test_each_record_is_one_object_with_its_metrics_beside_its_fields(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        step(10, accuracy=0.25),
        EvaluationRecord(step=23, epoch=0, loss=0.4, seconds=0.1, metrics={"accuracy": 0.5}),
    )
    assert read_metrics(path) == [
        {
            "kind": "step",
            "step": 10,
            "epoch": 0,
            "loss": 0.5,
            "learning_rate": 1e-3,
            "samples_per_second": 1000.0,
            "grad_norm": None,
            "loss_scale": None,
            "accuracy": 0.25,
        },
        {"kind": "evaluation", "step": 23, "epoch": 0, "loss": 0.4, "seconds": 0.1, "accuracy": 0.5},
    ]


def test_a_record_can_be_read_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "metrics.jsonl")
    writer.on_start(run_info())
    writer.on_step(step(1))
    assert [record["step"] for record in read_metrics(tmp_path / "metrics.jsonl")] == [1]
    writer.close()


def test_records_that_find_no_room_are_left_out_with_one_warning(tmp_path: Path, capsys) -> None:
    path = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(path)
    writer.on_start(run_info())
    writer.on_step(step(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        writer.on_step(step(2))
        writer.on_step(step(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    writer.on_step(step(4))
    writer.close()
    assert [record["step"] for record in read_metrics(path)] == [1, 4]
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written: ") == 1


def test_a_metric_called_like_a_field_does_not_hide_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(
        path,
        StepRecord(
            step=1,
            epoch=0,
            loss=0.5,
            learning_rate=1e-3,
            samples_per_second=10.0,
            metrics=MappingProxyType({"loss": 7.0, "step": 8.0}),
        ),
    )
    (record,) = read_metrics(path)
    assert (record["loss"], record["step"], record["metric_loss"], record["metric_step"]) == (0.5, 1, 7.0, 8.0)


def test_resuming_cuts_off_the_steps_that_are_taken_again_and_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(10), step(20), EvaluationRecord(step=23, epoch=0, loss=0.4, seconds=0.1), step(30))
    with path.open("a") as stream:
        stream.write('{"kind": "step", "st')
    assert len(read_metrics(path)) == 4
    write(path, step(30, loss=0.25), start_step=23)
    assert [(r["kind"], r["step"], r["loss"]) for r in read_metrics(path)] == [
        ("step", 10, 0.5),
        ("step", 20, 0.5),
        ("evaluation", 23, 0.4),
        ("step", 30, 0.25),
    ]


def test_a_run_from_the_start_starts_the_file_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, step(10))
    write(path, step(5))
    assert [record["step"] for record in read_metrics(path)] == [5]


@pytest.mark.parametrize("line", ["gibberish", "[1, 2]", "7", '{"loss": 1}'])
def test_a_file_that_is_no_metrics_file_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "step", "step": 1}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_metrics(path)


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_json(path, {"loss": math.nan, "path": tmp_path, "n": np.int64(3), "pair": (1, 2.5), "ok": True})
    old = json.loads(path.read_text())
    assert old == {"loss": None, "path": str(tmp_path), "n": 3, "pair": [1, 2.5], "ok": True}
    with pytest.raises(TypeError, match="object"):
        write_json(path, {"loss": object()})
    assert json.loads(path.read_text()) == old
    assert os.listdir(tmp_path) == ["summary.json"]


class Recorder(Observer):
    def __init__(self, log: list[str], fails: bool = False) -> None:
        self.log, self.fails = log, fails

    def on_progress(self, step: int) -> None:
        self.log.append(f"progress {step}")

    def on_message(self, text: str) -> None:
        self.log.append(text)

    def close(self) -> None:
        self.log.append("closed")
        if self.fails:
            raise OSError("disk full")


def test_several_observers_hear_the_same() -> None:
    log: list[str] = []
    observers = Observers([Recorder(log), Observer(), Recorder(log)])
    observers.on_start(run_info())
    observers.on_progress(3)
    observers.on_message("hello")
    observers.close()
    assert log == ["progress 3"] * 2 + ["hello"] * 2 + ["closed"] * 2


class FullDisk(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


class Curves(Observer):
    """Draws to a disk that is full from the first epoch on."""

    output = "curves.png"

    def on_epoch(self, record: EpochRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_one_that_can_no_longer_write_is_left_out_with_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    log: list[str] = []
    observers = Observers([PlainConsole(say=FullDisk().write), Curves(), Recorder(log)])
    with pytest.raises(OSError, match="No space"):
        observers.on_start(run_info())
    observers.on_message("hello")
    observers.on_progress(1)
    for step in (1, 2):
        observers.on_epoch(EpochRecord(step, 0, {}))
    observers.close()
    assert log == ["hello", "progress 1", "closed"]
    said = capsys.readouterr().err.splitlines()
    left_out = [f"hvdtrain: warning: {name}" for name in ("standard output", "curves.png")]
    assert [line.split(" cannot be written")[0] for line in said] == left_out
    assert "No space left on device). Training goes on without it." in said[0]


def test_tensorboard_holds_training_and_validation_under_the_same_tags(tmp_path: Path) -> None:
    from hvdtrain.observability.tensorboard import TensorBoardWriter

    writer = TensorBoardWriter(tmp_path)
    writer.on_start(run_info())
    writer.on_step(step(10, accuracy=0.25))
    writer.on_evaluation(EvaluationRecord(step=23, epoch=0, loss=0.4, seconds=0.1, metrics={"accuracy": 0.5}))
    writer.close()
    training, validation = (_scalars(tmp_path / run) for run in ("train", "validation"))
    assert training == {
        ("loss", 10): 0.5,
        ("accuracy", 10): 0.25,
        ("learning_rate", 10): pytest.approx(1e-3),
        ("samples_per_second", 10): 1000.0,
    }
    assert validation == {("loss", 23): pytest.approx(0.4), ("accuracy", 23): 0.5, ("seconds", 23): pytest.approx(0.1)}


def _scalars(folder: Path) -> dict[tuple[str, int], float]:
    import tensorflow as tf

    (file,) = folder.iterdir()
    events = [event for event in tf.compat.v1.train.summary_iterator(str(file)) if event.summary.value]
    return {
        (value.tag, event.step): float(tf.make_ndarray(value.tensor))
        for event in events
        for value in event.summary.value
    }
