"""`bench --parallel`: the order of launches, what becomes of those that fail, the formulas and the report."""

import json
import os
import time
from pathlib import Path

import pytest

from hvdtrain.bench import loopback
from hvdtrain.bench.document import Figure, to_markdown
from hvdtrain.bench.launching import Answer, LaunchFailed
from hvdtrain.bench.layouts import layouts, sent_mb, words_of
from hvdtrain.bench.parallel import PEAKS, Comparison, run_layouts
from hvdtrain.bench.parallel_report import parallel_report
from hvdtrain.bench.results import ParallelResults
from hvdtrain.cli.main import main
from hvdtrain.config.parallel import parse_axes

ANSWER = {"step_ms": 10.0, "parameters": 1000, "sent_bytes": 2_000_000}


class Machine:
    """Answers as two ranks would: one core in 16 ms, tp in 5, without an exchange in 8; pipelines fail."""

    def __init__(self):
        self.asked = []

    def __call__(self, words):
        its = words[words.index("--run-dir") + 2 :]
        self.asked.append(" ".join(its))
        if "pp=2" in its:
            raise LaunchFailed("a stage is missing")
        folder = Path(words[words.index("--run-dir") + 1])
        folder.mkdir()
        (folder / PEAKS).write_text("".join(json.dumps(peak) + "\n" for peak in (500.0, 600.0 - 100 * bool(its))))
        times = {"tp=2": 5.0, "--cores": 16.0, "--local-steps": 8.0}
        step_ms = next((time for word, time in times.items() if word in its), 10.0)
        return Answer({**ANSWER, "step_ms": step_ms}, 0.0)


def compared(**more):
    names = {2: ["dp", "one-core", "no-exchange", "tp", "pp"]}
    return Comparison(**{"model": "tiny", "ranks": [2], "layouts": names, "controllers": ["gloo"], **more})


def run(machine, **more):
    kept = []
    options = {"rounds": 2, "steps": 3, "limit_s": 9.0, **more}
    return run_layouts(compared(**options), log=lambda line: None, keep=kept.append, ask_for=machine), kept


def test_layouts_take_turns_and_one_that_fails_is_not_started_again():
    machine = Machine()
    cells, kept = run(machine)
    pipeline = "--parallel pp=2 --accumulate 4"
    one, apart = (" ".join(layouts(2)[name]) for name in ("one-core", "no-exchange"))
    assert machine.asked == ["", one, apart, "--parallel tp=2", pipeline, "--parallel tp=2", apart, one, ""]
    assert [len(cell.rounds) for cell in cells] == [2, 2, 2, 2, 0]
    assert cells[4].skipped == "a stage is missing"
    assert len(kept) == 2
    assert cells[0].rounds[0].sent_mb == pytest.approx(2.0)
    assert (cells[0].rounds[0].peak_mib, cells[3].rounds[0].peak_mib) == (600.0, 500.0)


def test_mpi_puts_nothing_on_the_loopback():
    cells, _ = run(Machine(), controllers=["mpi"])
    assert cells[0].rounds[0].sent_mb is None
    assert cells[0].command.startswith("mpirun ")


def test_one_core_has_one_process():
    one = run(Machine())[0][1]
    assert one.command.startswith("python -m hvdtrain bench layout ")
    assert one.rounds[0].sent_mb is None


def test_one_core_keeps_to_its_core(tmp_path, monkeypatch):
    """With one thread, but on all cores, TensorFlow used one and a half."""
    seen = []

    def train(argv):
        seen.extend([argv, os.sched_getaffinity(0)])
        return 1

    monkeypatch.setattr("hvdtrain.cli.train.main", train)
    before = os.sched_getaffinity(0)
    option, cores = layouts(len(before))["one-core"]
    try:
        main(["bench", "layout", "digits", option, cores, "--run-dir", str(tmp_path / "run")])
    finally:
        os.sched_setaffinity(0, before)
    assert seen == [["digits", "--run-dir", str(tmp_path / "run")], {min(before)}]


def test_the_report_has_ratios_bytes_and_a_picture():
    cells, _ = run(Machine())
    blocks = list(parallel_report(ParallelResults("command", {}, cells)))
    text = to_markdown(blocks)
    assert "| dp | 10.0 | 10.0 .. 10.0 | 1.00 | 1.25 | 1.25 | 600 | 0 | 0.0 | 2.0 | 2 |" in text
    assert "| one-core | 16.0 | 16.0 .. 16.0 | 1.60 | - | 2.00 |" in text
    assert "| tp | 5.0 | 5.0 .. 5.0 | 0.50 | 0.62 | 0.62 | 500 | 100 |" in text
    assert "| pp | a stage is missing |" in text
    (picture,) = [block for block in blocks if isinstance(block, Figure)]
    assert picture.png.startswith(b"\x89PNG")


def test_bytes_follow_the_formulas():
    assert sent_mb("dp", "lm", 4, 1_000_000) == pytest.approx(4 * 2 * 3)
    assert sent_mb("zero=3", "lm", 2, 1_000_000) == pytest.approx(4 * 3)
    assert sent_mb("tp", "tiny", 2, 0) == pytest.approx(4 * 2 * (8 * 16 * 32) * (4 * 4 + 2) / 1e6)
    assert sent_mb("sp", "tiny", 2, 0) == sent_mb("tp", "tiny", 2, 0)
    positions = 8 * 4 * 3 / 4 * (8 * 16 * 32)
    assert sent_mb("cp", "tiny", 4, 1_000_000) == pytest.approx(4 * (2 * 3 + positions / 1e6))
    assert sent_mb("dp,pp=2", "tiny", 4, 1_000_000) == pytest.approx(4 * (2 + 2 * (8 * 16 * 32) / 1e6))
    assert sent_mb("pp=2,tp=2", "tiny", 4, 1_000_000) == pytest.approx(4 * (2 * 18 + 2 * 2) * (8 * 16 * 32) / 1e6)
    assert sent_mb("dp,tp=2,zero=1", "tiny", 4, 10**6) == pytest.approx(4 * (2 + 2 * 18 * (8 * 16 * 32) / 1e6))
    assert sent_mb("one-core", "lm", 2, 1_000_000) is None


def test_bytes_are_counted_from_a_logged_step_to_a_later_one(tmp_path, monkeypatch):
    sent, looks = [0], []

    def look():
        looks.append(sent[0])
        return sent[0]

    monkeypatch.setattr(loopback, "sent_to_itself", look)
    metrics = tmp_path / "metrics.jsonl"
    with loopback.LoopbackCounter(metrics) as counter:
        for step, total in ((2, 1_000), (6, 9_000)):
            assert counter.bytes_per_step() is None
            sent[0] = total
            with metrics.open("a") as file:
                file.write(json.dumps({"kind": "step", "step": step}) + "\n")
            looked = len(looks)
            while len(looks) < looked + 3:  # the second of them was noted with the line
                time.sleep(0.001)
        sent[0] = 1_000_000  # what ranks tell one another as they end
    assert counter.bytes_per_step() == 2_000


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layouts_are_meshes_of_all_ranks(ranks):
    for name, options in layouts(ranks).items():
        if "--parallel" in options:
            sizes = parse_axes(options[options.index("--parallel") + 1])
            product = 1
            for size in sizes.values():
                product *= size
            assert ranks % product == 0, name
        assert words_of(name, "lm", ranks, 5, Path("run"))[-len(options) :] == options or not options


def test_an_unknown_layout_is_refused_before_anything_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "--parallel", "--layouts", "tq"]) == 2
    assert "bench --parallel has no layout 'tq' of 2 ranks. Perhaps you meant: tp." in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
