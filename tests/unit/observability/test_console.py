"""What is shown while training: plain lines, and the live display."""

import io
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from hvdtrain.observability import wording
from hvdtrain.observability.console import Frame, LiveDisplay, PlainConsole, make_console
from hvdtrain.observability.events import EpochRecord, EvaluationRecord, Observer, StepRecord
from tests import builders

run_info = partial(builders.run_info, run_dir=Path("runs/one"), threads=1)


def step(number: int) -> StepRecord:
    so_far = {"loss": 0.0812, "accuracy": 0.9771}
    return StepRecord(
        step=number,
        epoch=(number - 1) // 23,
        loss=0.5,
        learning_rate=1e-3,
        samples_per_second=1024.0,
        metrics={"accuracy": 0.5},
        so_far=so_far,
    )


def evaluation(number: int) -> EvaluationRecord:
    return EvaluationRecord(
        step=number, epoch=(number - 1) // 23, loss=0.0734, seconds=0.1, metrics={"accuracy": 0.9778}
    )


def epoch(number: int) -> EpochRecord:
    figures = {"loss": 0.0811, "accuracy": 0.9772, "val_loss": 0.0734, "val_accuracy": 0.9778}
    return EpochRecord(number, (number - 1) // 23, figures)


SUMMARY = {
    "val_accuracy": 0.9778,
    "val_loss": 0.0734,
    "train_loss": 0.0312,
    "samples_per_second": 14210.4,
    "step_ms": {"median": 4.31, "p90": 5.0},
    "wall_seconds": 3723.0,
}


class Stream(io.StringIO):
    """Counts how much of what was written was also flushed."""

    flushed = 0

    def flush(self) -> None:
        self.flushed = len(self.getvalue())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def plain(stream: Stream, clock: Clock) -> PlainConsole:
    return PlainConsole(say=lambda line: print(line, file=stream), clock=clock)


def take_steps(console: Observer, clock: Clock, steps: range, seconds: float) -> None:
    for number in steps:
        clock.now += seconds
        console.on_progress(number)
        if number % 10 == 0:
            console.on_step(step(number))


def test_the_header_says_what_runs(plain: PlainConsole, stream: Stream) -> None:
    plain.on_start(run_info())
    assert stream.getvalue().splitlines() == [
        "recipe      digits, 21,418 parameters",
        "backend     horovod (mpi), 2 ranks by horovodrun, 1 thread each",
        "batch       64 samples, 32 per rank",
        "steps       230, 10 epochs of 23",
        "run folder  runs/one",
    ]


def test_the_header_of_one_process_speaks_of_no_ranks_to_share_with(plain: PlainConsole, stream: Stream) -> None:
    alone = {"backend": "single", "world_size": 1, "launcher": "none", "controller": None}
    plain.on_start(run_info(**alone, per_replica_batch=64, run_dir=None, threads=2, start_step=46))
    assert stream.getvalue().splitlines() == [
        "model       digits, 21,418 parameters",
        "backend     single, 1 rank, 2 threads",
        "batch       64 samples",
        "steps       230, 10 epochs of 23, resumed after 46",
    ]


def test_the_header_says_which_ranks_do_what(plain: PlainConsole, stream: Stream) -> None:
    roles = {"chief": 1, "worker": 2, "parameter server": 1}
    plain.on_start(run_info(backend="parameter_server", controller=None, world_size=4, roles=roles, run_dir=None))
    assert stream.getvalue().splitlines()[1:3] == [
        "backend     parameter_server, 4 ranks by horovodrun (1 chief, 2 workers, 1 parameter server), 1 thread each",
        "batch       64 samples, each by one worker",
    ]


def test_plain_lines_come_at_most_every_two_seconds(plain: PlainConsole, stream: Stream, clock: Clock) -> None:
    plain.on_start(run_info())
    stream.truncate(stream.seek(0))
    take_steps(plain, clock, range(1, 121), seconds=1 / 16)
    plain.on_evaluation(evaluation(115))
    plain.on_epoch(epoch(115))
    assert stream.getvalue().splitlines() == [
        "step  10/230  epoch  1/10  loss 0.0812  accuracy 0.9771  1024 samples/s  ETA 0:14",
        "step  50/230  epoch  3/10  loss 0.0812  accuracy 0.9771  1024 samples/s  ETA 0:11",
        "step  90/230  epoch  4/10  loss 0.0812  accuracy 0.9771  1024 samples/s  ETA 0:09",
        "epoch  5/10  loss 0.0811  accuracy 0.9772  val_loss 0.0734  val_accuracy 0.9778",
    ]


def test_the_last_step_is_said_before_its_evaluation_and_the_results(
    plain: PlainConsole, stream: Stream, clock: Clock
) -> None:
    plain.on_start(run_info())
    stream.truncate(stream.seek(0))
    take_steps(plain, clock, range(1, 231), seconds=0.001)
    plain.on_evaluation(evaluation(230))
    plain.on_epoch(epoch(230))
    plain.on_end(SUMMARY)
    assert stream.getvalue().splitlines()[1:] == [
        "step 230/230  epoch 10/10  loss 0.0812  accuracy 0.9771  1024 samples/s  ETA 0:00",
        "epoch 10/10  loss 0.0811  accuracy 0.9772  val_loss 0.0734  val_accuracy 0.9778",
        "validation  accuracy 0.9778, loss 0.0734",
        "training    loss 0.0312",
        "time        1:02:03, median step 4.31 ms (14210 samples/s)",
        "run folder  runs/one",
    ]


def test_lines_of_epochs_alone(stream: Stream, clock: Clock) -> None:
    plain = PlainConsole(say=lambda line: print(line, file=stream), min_seconds=None, clock=clock)
    plain.on_start(run_info())
    stream.truncate(stream.seek(0))
    take_steps(plain, clock, range(1, 231), seconds=1.0)
    plain.on_epoch(EpochRecord(230, 9, {"loss": 0.0811, "f1_score": np.array([0.5, 0.75])}))
    plain.on_end({"train_loss": float("nan"), "wall_seconds": 5.0})
    assert stream.getvalue().splitlines() == [
        "epoch 10/10  loss 0.0811  f1_score 0.6250",
        "time        0:05",
        "run folder  runs/one",
    ]


def test_lines_are_logged_and_scroll_by_above_a_live_display(capsys, monkeypatch) -> None:
    make_console(live=False).on_start(run_info())
    assert "recipe      digits" in capsys.readouterr().out
    shown = Stream()
    monkeypatch.setattr(sys, "stdout", shown)
    both = make_console(live=True)
    both.on_start(run_info())
    both.on_epoch(epoch(115))
    both.on_message("[bold]a notice[/bold]")
    both.on_progress(230)
    both.on_end(SUMMARY)
    both.close()
    lines = shown.getvalue().splitlines()
    assert lines.count("epoch  5/10  loss 0.0811  accuracy 0.9772  val_loss 0.0734  val_accuracy 0.9778") == 1
    assert lines.count("[bold]a notice[/bold]") == 1
    assert lines[-4].endswith("validation  accuracy 0.9778, loss 0.0734"), "below the display's last lines"
    assert lines[-1] == "run folder  runs/one"


def terminal(stream: io.StringIO, width: int = 100) -> Console:
    return Console(file=stream, force_terminal=True, width=width, color_system=None, highlight=False)


def test_the_live_display_shows_progress_and_the_latest_figures(stream: Stream, clock: Clock) -> None:
    live = LiveDisplay(stream, console=terminal(stream), clock=clock)
    live.on_start(run_info())
    assert "waiting for the first figures" in stream.getvalue()
    take_steps(live, clock, range(1, 116), seconds=1 / 16)
    live.on_evaluation(evaluation(115))
    live.on_epoch(epoch(115))
    take_steps(live, clock, range(116, 121), seconds=1 / 8)
    last = stream.getvalue().splitlines()[-2:]
    assert "step 120/230  epoch  6/10  ETA 0:08" in last[0]
    assert last[1] == "loss 0.0812  accuracy 0.9771  val_accuracy 0.9778  val_loss 0.0734  1024 samples/s"
    live.on_end(SUMMARY)
    live.close()
    end = stream.getvalue().replace("\x1b[?25h", "").splitlines()
    assert any("━" * 40 + "  step 230/230  epoch 10/10" in line and "ETA" not in line for line in end[-8:])


def test_the_live_display_draws_eight_times_a_second_at_most(stream: Stream, clock: Clock) -> None:
    live = LiveDisplay(stream, console=terminal(stream), clock=clock)
    live.on_start(run_info(total_steps=10_000))
    stream.truncate(stream.seek(0))
    take_steps(live, clock, range(1, 10_001), seconds=0.0005)
    live.close()
    assert 35 <= stream.getvalue().count("samples/s") <= 42


@pytest.mark.parametrize("width", [8, 20, 33, 50, 79, 200])
def test_the_display_never_wraps(width: int) -> None:
    stream = io.StringIO()
    frame = Frame(run_info(total_steps=10**7))
    frame.trained, frame.evaluated = wording.step_figures(step(10)), wording.evaluation_figures(evaluation(10))
    frame.speed = "14210 samples/s"
    terminal(stream, width).print(frame)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= width


def test_the_cursor_is_visible_and_prints_go_back_to_where_they_were(clock: Clock) -> None:
    stream, stdout, stderr = Stream(), sys.stdout, sys.stderr
    live = LiveDisplay(stream, console=terminal(stream), clock=clock)
    live.on_start(run_info())
    assert stream.getvalue().rfind("\x1b[?25h") > stream.getvalue().rfind("\x1b[?25l")
    print("printed by a user's model")
    live.close()
    live.close()
    assert "printed by a user's model" in stream.getvalue()
    assert (sys.stdout, sys.stderr) == (stdout, stderr)


def test_ranks_on_a_mesh_share_replicas():
    given = run_info(world_size=8, axes={"dp": 2, "tp": 4}, global_batch=64, per_replica_batch=32)
    lines = dict(wording.header(given))
    assert lines["backend"] == "horovod (mpi), 8 ranks on a mesh of dp 2 x tp 4 by horovodrun, 1 thread each"
    assert lines["batch"].startswith("64 samples, 32 per replica")
    assert given.replicas == 2
    alone = dict(wording.header(run_info(axes={"tp": 2}, per_replica_batch=64)))
    assert alone["batch"] == "64 samples"
