"""`watch`: a run as its folder shows it, from another process."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.cli.main import main
from hvdtrain.observability.events import BaseObserver, EpochRecord, EvaluationRecord, RunInfo, StepRecord
from hvdtrain.observability.jsonl import JsonlWriter
from hvdtrain.observability.status import RunStatus, StatusWriter
from hvdtrain.runs.watching import RunFollower, is_written_to

INFO = RunInfo(
    recipe="digits",
    backend="horovod",
    world_size=2,
    launcher="mpirun",
    controller="mpi",
    global_batch=64,
    per_replica_batch=32,
    total_steps=46,
    steps_per_epoch=23,
    parameters=1000,
    options={"clip_norm": np.float32(1.0), "odd": object()},
)

RUNNER = """
    import sys
    from pathlib import Path
    from hvdtrain.checkpoint.lock import FolderLock
    from hvdtrain.observability.status import StatusWriter
    from tests.unit.runs.test_watching import INFO

    folder = Path(sys.argv[1])
    FolderLock(folder).acquire()
    StatusWriter(folder / "status.json").on_start(INFO)
    print("holds", flush=True)
    sys.stdin.readline()
"""


class Notes(BaseObserver):
    """Keeps what it is shown."""

    def __init__(self):
        self.seen = []

    def on_start(self, info):
        self.seen.append(info)

    def on_step(self, record):
        self.seen.append(record)

    def on_evaluation(self, record):
        self.seen.append(record)

    def on_epoch(self, record):
        self.seen.append(record)


@pytest.fixture
def runner(tmp_path):
    """A process that writes to `tmp_path/run`."""
    command = [sys.executable, "-c", textwrap.dedent(RUNNER), str(tmp_path / "run")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


def recorded(folder, *, start=0):
    """Write a run's records as training does."""
    folder.mkdir(exist_ok=True)
    writer = JsonlWriter(folder / "metrics.jsonl")
    writer.on_start(replace(INFO, start_step=start))
    return writer


STEP = StepRecord(
    step=10,
    epoch=0,
    loss=0.5,
    learning_rate=1e-3,
    samples_per_second=1280.0,
    grad_norm=2.0,
    loss_scale=None,
    metrics={"accuracy": 0.75, "recall": np.array([1.0, 0.5])},
)


def test_a_follower_shows_each_record_once_as_training_showed_it(tmp_path):
    shown = Notes()
    follower = RunFollower(tmp_path, shown)
    assert follower.look() == "none"
    StatusWriter(tmp_path / "status.json").on_start(INFO)
    writer = recorded(tmp_path)
    writer.on_step(STEP)
    follower.look()
    follower.look()
    writer.on_evaluation(EvaluationRecord(step=23, epoch=0, loss=0.25, seconds=1.5, metrics={"accuracy": 0.5}))
    writer.on_epoch(EpochRecord(23, 0, {"loss": 0.3}))
    follower.look()
    info, step, evaluation, epoch = shown.seen
    assert replace(info, options={}) == replace(INFO, options={}, run_dir=tmp_path)
    assert (step.step, step.loss, step.samples_per_second, step.metrics["accuracy"]) == (10, 0.5, 1280.0, 0.75)
    assert step.metrics["recall"].tolist() == [1.0, 0.5]
    assert (evaluation.loss, evaluation.metrics) == (0.25, {"accuracy": 0.5})
    assert epoch == EpochRecord(23, 0, {"loss": 0.3})
    assert follower.step == 23


def test_half_a_line_waits_for_the_other_half(tmp_path):
    StatusWriter(tmp_path / "status.json").on_start(INFO)
    shown, file = Notes(), tmp_path / "metrics.jsonl"
    follower = RunFollower(tmp_path, shown)
    line = json.dumps({"kind": "epoch", "step": 23, "epoch": 0, "loss": 0.5})
    file.write_text(line[:20])
    follower.look()
    assert len(shown.seen) == 1
    file.write_text(line + "\n")
    follower.look()
    assert shown.seen[1] == EpochRecord(23, 0, {"loss": 0.5})


def test_a_resumed_run_begins_anew_after_its_checkpoint(tmp_path):
    status, shown = StatusWriter(tmp_path / "status.json"), Notes()
    status.on_start(INFO)
    writer = recorded(tmp_path)
    writer.on_step(STEP)
    writer.on_step(replace(STEP, step=20))
    follower = RunFollower(tmp_path, shown)
    follower.look()
    status = StatusWriter(tmp_path / "status.json")
    status.on_start(replace(INFO, start_step=10))
    again = recorded(tmp_path, start=10)
    again.on_step(replace(STEP, step=20, loss=0.4))
    follower.look()
    kinds = [(each.start_step if isinstance(each, RunInfo) else each.step) for each in shown.seen]
    assert kinds == [0, 10, 20, 10, 20]
    assert shown.seen[-1].loss == 0.4


def test_the_lock_tells_whether_a_job_writes_to_the_folder(tmp_path, runner):
    folder = tmp_path / "run"
    assert is_written_to(folder) is True
    runner.kill()
    runner.wait(30)
    assert (folder / ".lock").exists()
    assert is_written_to(folder) is False
    (folder / ".lock").unlink()
    assert is_written_to(folder) is False


def test_once_tells_how_a_run_stands(tmp_path, runner, capsys):
    folder = tmp_path / "run"
    recorded(folder).on_step(STEP)
    assert main(["watch", str(folder), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "steps       46, 2 epochs of 23" in shown
    assert "step 10/46  epoch 1/2  loss 0.5000  accuracy 0.7500  recall 0.7500  1280 samples/s" in shown
    assert f"running on {socket.gethostname()}: {folder}, at step 10 of 46" in shown
    runner.kill()
    runner.wait(30)
    assert main(["watch", str(folder), "--once"]) == 1
    assert f"died without a word (process {runner.pid} on {socket.gethostname()})" in capsys.readouterr().out


@pytest.mark.parametrize(("state", "code", "said"), [("stopped", 0, "stopped by a signal"), ("failed", 1, "failed: ")])
def test_an_end_in_order_is_told(tmp_path, capsys, state, code, said):
    status = StatusWriter(tmp_path / "status.json")
    status.on_start(INFO)
    recorded(tmp_path).on_step(STEP)
    status.ended(state, "loss is NaN\nand more")
    assert main(["watch", str(tmp_path)]) == code
    shown = capsys.readouterr().out
    assert said in shown
    assert f"--resume {tmp_path}" in shown
    assert "and more" not in shown


def test_a_finished_run_shows_its_results(tmp_path, capsys):
    status = StatusWriter(tmp_path / "status.json")
    status.on_start(INFO)
    recorded(tmp_path).on_step(STEP)
    (tmp_path / "summary.json").write_text('{"train_loss": 0.125}')
    status.on_end({})
    status.ended("failed", "what comes after the end does not count")
    assert main(["watch", str(tmp_path)]) == 0
    assert "training    loss 0.1250" in capsys.readouterr().out


def test_a_folder_without_a_run_is_awaited_or_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path / "none"), "--once"]) == 2
    assert f"watch {tmp_path / 'none'}: there is no run (no status.json in it)." in capsys.readouterr().err
    (tmp_path / "config.yaml").touch()
    assert main(["watch", str(tmp_path)]) == 2
    assert "an earlier version wrote it" in capsys.readouterr().err
    (tmp_path / "status.json").write_text('{"state": "running"}')
    assert RunStatus.read(tmp_path / "status.json") is None


def test_ctrl_c_ends_the_display_and_not_the_run(tmp_path, runner):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "hvdtrain", "watch", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as watch:
        assert watch.stdout.readline().startswith("recipe")
        recorded(folder).on_step(STEP)
        assert any("step 10/46" in watch.stdout.readline() for _ in range(6))
        watch.send_signal(signal.SIGINT)
        rest = watch.stdout.read()
        assert watch.wait(20) == 130
    assert "Traceback" not in rest
    assert runner.poll() is None
    assert not list(Path(folder).glob(".lock.*"))
    assert os.stat(folder / ".lock").st_size > 0


def test_waiting_ends_with_the_run(tmp_path):
    """A run that begins while it is awaited, and is killed."""
    folder = tmp_path / "run"
    watch = subprocess.Popen(
        [sys.executable, "-m", "hvdtrain", "watch", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watch.stderr.readline() == f"hvdtrain: {folder} has not begun; waiting for it\n"
    command = [sys.executable, "-c", textwrap.dedent(RUNNER), str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        assert watch.stdout.readline().startswith("recipe")
        process.kill()
    begin = time.monotonic()
    assert watch.wait(30) == 1
    assert time.monotonic() - begin < 15
    assert "died without a word" in watch.stdout.read()
