"""The order of launches, what becomes of those that fail, and mistakes in the command line; ranks are not started."""

import sys

import pytest

from hvdtrain.bench.engine import Answer, Job, LaunchFailed, launch, measure, reason_of
from hvdtrain.cli.main import main


class Machine:
    """Answers jobs, and fails one from some launch on."""

    def __init__(self, failing="", after=0):
        self.asked = []
        self._failing, self._after = failing, after

    def __call__(self, job):
        fails = job.name == self._failing and self.asked.count(job.name) >= self._after
        self.asked.append(job.name)
        if fails:
            raise LaunchFailed("the backend is not there")
        return Answer({"windows_ms": [10.0, 11.0, 15.0]}, {"parameters": 7}, 0.1)


def run(machine, names="ABC", rounds=3, **more):
    logged, kept = [], []
    jobs = [Job(name=name, setting={"ranks": 2}, command=["run", name], **more) for name in names]
    runs = measure(jobs, rounds, machine, log=logged.append, keep=lambda runs: kept.append(list(runs)))
    return {each.name: each for each in runs}, logged, kept


def test_jobs_take_turns_there_and_back():
    machine = Machine()
    runs, logged, kept = run(machine)
    assert machine.asked == [*"ABC", *"CBA", *"ABC"]
    assert [len(runs[name].rounds) for name in "ABC"] == [3, 3, 3]
    assert (runs["A"].rounds[0].foreign_cores, runs["A"].facts, runs["A"].command) == (0.1, {"parameters": 7}, "run A")
    assert runs["A"].medians("windows_ms") == [11.0] * 3
    assert len(logged) == 9
    assert "windows_ms 11" in logged[0]
    assert [len(runs[0].rounds) for runs in kept] == [1, 2, 3], "what was measured is kept after each round"


def test_groups_follow_one_another():
    machine = Machine()
    jobs = [Job(name=name, command=[], group=name[0]) for name in ("a1", "b1", "a2", "b2")]
    measure(jobs, 2, machine, log=lambda line: None)
    assert machine.asked == ["a1", "a2", "a2", "a1", "b1", "b2", "b2", "b1"]


def test_a_job_that_fails_says_why_is_not_started_again_and_the_others_go_on():
    machine = Machine("B", after=1)
    runs, logged, _ = run(machine)
    assert machine.asked.count("B") == 2
    assert (len(runs["B"].rounds), runs["B"].skipped) == (1, "the backend is not there")
    assert len(runs["A"].rounds) == 3
    assert any("not measured: the backend is not there" in line for line in logged)


def test_a_job_that_cannot_run_is_listed_and_not_started():
    machine = Machine()
    runs, _, _ = run(machine, skipped="it is one replica")
    assert machine.asked == []
    assert runs["A"].skipped == "it is one replica"


PROGRAM = """
import json, os
print("chatter")
figures = {"peak_mib": float(os.environ["PEAK"])}
print("[1,0]<stdout>:HVDTRAIN-BENCH " + json.dumps({"figures": figures, "facts": {"threads": "1"}}))
"""


def test_figures_are_found_among_other_lines():
    job = Job(name="", command=[sys.executable, "-c", PROGRAM], environ={"PEAK": "7"})
    answer = launch(job, limit_s=30)
    assert (answer.figures, answer.facts) == ({"peak_mib": 7.0}, {"threads": "1"})
    assert answer.foreign_cores >= 0.0
    assert job.shown.startswith("PEAK=7 python -c ")


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
        launch(Job(name="", command=[sys.executable, "-c", code]), limit_s=1 if "sleep" in code else 60)
    assert str(raised.value) == said


def test_a_program_that_is_not_there():
    with pytest.raises(LaunchFailed, match="nosuchprogram: No such file"):
        launch(Job(name="", command=["nosuchprogram"]), limit_s=1)


def test_the_last_error_is_the_reason():
    err = "warning\nTraceback\n  File\nRuntimeError: the cause\nPrimary job terminated"
    assert reason_of(3, "", err) == "exit code 3: RuntimeError: the cause"


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
        (["--parallel", "--layouts", "tq"], ["no layout 'tq' of 2 ranks. Perhaps you meant: tp."]),
        (["--autotune", "--backends", "mirrored"], ["--backends"]),
        (["compare", "nowhere", "nowhere"], ["nowhere", "cannot be read"]),
        (["side", "mirrored", "nosuch", "--batch", "4"], ["nosuch"]),
        (["side", "plain-mpi", "mlp"], ["--batch"]),
    ],
)
def test_mistakes_are_refused_before_anything_runs(tmp_path, monkeypatch, capsys, words, expected):
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


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_what_a_report_needs_is_asked_for_before_anything_runs(package, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    assert f"bench needs the package {package}, which is not installed: pip install 'hvdtrain[bench]'" in said(capsys)
    assert not list(tmp_path.iterdir())
