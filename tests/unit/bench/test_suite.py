"""The order of launches, and what becomes of those that fail; no ranks are started but for commands that fail."""

import sys

import pytest

from hvdtrain.bench.collectives import run_collectives
from hvdtrain.bench.launching import Answer, LaunchFailed, ask, launcher, reason_of, shown
from hvdtrain.bench.plan import Matrix, points
from hvdtrain.bench.suite import Launching, run_suite
from hvdtrain.cli.main import main

ANSWER = {
    "windows_ms": [10.0, 11.0],
    "cpu_s": 0.02,
    "kernel_share": 0.25,
    "page_faults": 300.0,
    "peak_rss_mib": [500.0],
    "settings": {"threads": "1"},
    "parameters": 7,
    "gradients": [{"bytes": 28}],
}


class Machine:
    """Answers commands, and fails those of one side from some launch on."""

    def __init__(self, failing="", after=0):
        self.asked = []
        self._failing, self._after = failing, after

    def __call__(self, words):
        name = words[words.index("side") + 1]
        if name == self._failing and self.asked.count(name) >= self._after:
            self.asked.append(name)
            raise LaunchFailed("the backend is not there")
        self.asked.append(name)
        return Answer(ANSWER, 0.1)


def run(machine, rounds=3):
    todo, refused = points(
        Matrix(sides=["horovod-mpi", "plain-mpi", "single"], models=["mlp"], ranks=[2], scalings=["strong"])
    )
    logged, kept = [], []
    cells = run_suite(todo, refused, Launching(rounds=rounds), log=logged.append, keep=kept.append, ask_for=machine)
    return {cell.side: cell for cell in cells}, logged, kept


def test_every_side_is_launched_in_every_round():
    machine = Machine()
    cells, logged, kept = run(machine)
    there = ["one-core", "horovod-mpi", "plain-mpi"]
    assert machine.asked == [*there, *reversed(there), *there]
    assert [len(cells[side].rounds) for side in there] == [3, 3, 3]
    assert cells["one-core"].gradients[0].bytes == 28
    assert cells["horovod-mpi"].rounds[0].foreign_cores == 0.1
    assert cells["horovod-mpi"].rounds[0].page_faults == 300.0
    assert cells["horovod-mpi"].rounds[0].kernel_share == 0.25
    assert "one replica" in cells["single"].skipped
    assert len(logged) == 9
    assert "11.00 ms a step" in logged[0]
    assert len(kept) == 3, "what was measured is kept after each round"


def test_a_side_that_is_not_there_says_why_and_the_others_go_on():
    machine = Machine("plain-mpi")
    cells, logged, _ = run(machine)
    assert machine.asked.count("plain-mpi") == 1
    assert (cells["plain-mpi"].rounds, cells["plain-mpi"].skipped) == ([], "the backend is not there")
    assert len(cells["horovod-mpi"].rounds) == 3
    assert any("not measured: the backend is not there" in line for line in logged)


def test_what_was_measured_before_a_failure_is_kept():
    cells, _, _ = run(Machine("horovod-mpi", after=2))
    assert (len(cells["horovod-mpi"].rounds), cells["horovod-mpi"].skipped) == (2, "the backend is not there")


def test_engines_take_turns_and_one_that_fails_is_left_out():
    asked = []

    def answer(words):
        name = words[words.index("engine") + 1]
        asked.append(name)
        if name == "tf-ring":
            raise LaunchFailed("it did not start")
        rows = [{"collective": "allreduce", "bytes": 1000, "ms": float(len(asked))}]
        skipped = {"alltoall": "there is none"} if name == "mpi4py" else {}
        return Answer({"series": rows, "skipped": skipped, "settings": {}}, 0.0)

    logged = []
    runs, series = run_collectives(
        ["mpi4py", "tf-ring", "memory"],
        ["allreduce", "alltoall"],
        [1000],
        ranks=2,
        rounds=2,
        limit_s=1.0,
        log=logged.append,
        ask_for=answer,
    )
    assert asked == ["mpi4py", "tf-ring", "memory", "memory", "mpi4py"]
    assert [run.skipped for run in runs] == [{"alltoall": "there is none"}, {"all": "it did not start"}, {}]
    assert [(one.engine, one.times_ms) for one in series] == [("mpi4py", [1.0, 5.0]), ("memory", [3.0, 4.0])]
    assert "--collectives add" in runs[2].command
    assert len(logged) == 5


def test_an_answer_is_found_among_other_lines():
    words = [sys.executable, "-c", "print('chatter'); print('[1,0]<stdout>:FIGURES ' + '{\"a\": [1]}')"]
    answer = ask(words, "FIGURES", limit_s=30)
    assert answer.value == {"a": [1]}
    assert answer.foreign_cores >= 0.0


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise ValueError('no such thing')", "exit code 1: ValueError: no such thing"),
        ("import time; time.sleep(30)", "no answer after 1 s"),
        ("pass", "exit code 0: it said nothing"),
        ("import sys; sys.exit('hvdtrain: error: this\\n  and that\\nother')", "this and that"),
    ],
)
def test_a_command_that_does_not_answer_says_why(code, said):
    with pytest.raises(LaunchFailed) as raised:
        ask([sys.executable, "-c", code], "FIGURES", limit_s=1 if "sleep" in code else 60)
    assert str(raised.value) == said


def test_a_program_that_is_not_there():
    with pytest.raises(LaunchFailed, match="nosuchprogram: No such file"):
        ask(["nosuchprogram"], "FIGURES", limit_s=1)


def test_the_last_error_is_the_reason():
    err = "warning\nTraceback\n  File\nRuntimeError: the cause\nPrimary job terminated"
    assert reason_of(3, "", err) == "exit code 3: RuntimeError: the cause"


def test_commands_are_shown_as_one_types_them():
    assert shown([*launcher("mpirun", 2), sys.executable, "-m", "a b"]).endswith("-np 2 python -m 'a b'")
    assert launcher("none", 1) == []


def said(capsys, *words):
    assert main(["bench", *words]) == 2
    err = capsys.readouterr().err
    assert err.count("hvdtrain: error:") == 1
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["colectives"], ["'colectives'", "Perhaps you meant: collectives"]),
        (["--models", "resnet21"], ["'resnet21'", "Perhaps you meant: resnet20"]),
        (["--backends", "mirored"], ["'mirored'", "Perhaps you meant: mirrored"]),
        (["--baseline", "plain"], ["'plain'", "Perhaps you meant: plain-"]),
        (["--ranks", "0"], ["--ranks", "at least 1"]),
        (["--ranks", "3"], ["among 3 ranks"]),
        (["--precisions", "float64"], ["--precisions", "float64"]),
        (["--round", "3"], ["'--round'", "Perhaps you meant: --rounds"]),
        (["--rounds", "x"], ["--rounds", "at least 1. Received: 'x'"]),
        (["collectives", "--engines", "mpi"], ["'mpi'", "Perhaps you meant: mpi4py"]),
        (["collectives", "--sizes", "12"], ["--sizes", "at least 1KB"]),
        (["collectives", "--collectives", "gather"], ["--collectives", "gather"]),
        (["compare", "nowhere", "nowhere"], ["nowhere", "cannot be read"]),
        (["side", "mirrored", "nosuch", "--batch", "4"], ["nosuch"]),
        (["side", "plain-mpi", "mlp"], ["--batch"]),
    ],
)
def test_wrong_words(tmp_path, monkeypatch, capsys, words, expected):
    monkeypatch.chdir(tmp_path)
    message = said(capsys, *words)
    for word in expected:
        assert word in message
    assert not list(tmp_path.iterdir())


def test_under_a_launcher_it_is_refused(monkeypatch, capsys):
    place = {"COMM_WORLD_RANK": "0", "COMM_WORLD_SIZE": "2", "COMM_WORLD_LOCAL_RANK": "0", "COMM_WORLD_LOCAL_SIZE": "2"}
    for name, value in place.items():
        monkeypatch.setenv(f"OMPI_{name}", value)
    assert "start it without mpirun" in said(capsys, "--models", "mlp")
    assert "start it without mpirun" in said(capsys, "collectives")
