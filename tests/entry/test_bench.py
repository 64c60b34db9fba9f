"""`python -m hvdtrain bench` as a user types it: small, to see that it works; what it measures means nothing here."""

import json
import re
import sys
import time

import psutil
import pytest

from hvdtrain.bench.collectives import series_of
from hvdtrain.bench.layouts import sent_mb
from hvdtrain.bench.results import read_results
from tests.awake import awake_seconds
from tests.launching import Job, hvdtrain

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("bench")]  # they share a report
TINY = "--models digits --ranks 2 --batch 16 --scaling strong --rounds 1 --windows 1 --warm-up 1 --steps 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A comparison of two sides, then one of collectives: one folder holds both."""
    place = tmp_path_factory.mktemp("bench")
    words = ["--backends", "horovod-mpi", "plain-gloo", "parameter_server", "single"]
    suite = hvdtrain("none", 1, "bench", *words, *TINY.split(), "--accumulate", "1", cwd=place)
    words = "--engines mpi4py memory tf-ring --collectives allreduce alltoall reducescatter --sizes 1KB 64KB --rounds 1"
    collectives = hvdtrain("none", 1, "bench", "collectives", *words.split(), cwd=place)
    (made,) = (place / "bench").iterdir()
    assert f"report      bench/{made.name}/report.html" in suite.out
    assert f"report      bench/{made.name}/report.html" in collectives.out
    assert {path.name for path in made.iterdir()} == {"results.json", "report.md", "report.html"}
    return made


def sides_of(folder):
    return {run.name: run for run in read_results(folder).comparisons["suite"].runs}


def test_all_sides_were_measured(folder):
    runs = sides_of(folder)
    rounds = {"one-core": 1, "horovod-mpi": 1, "plain-gloo": 1, "parameter_server": 1, "single": 0}
    assert {side: len(run.rounds) for side, run in runs.items()} == rounds
    assert "one replica" in runs["single"].skipped
    assert {run.facts["parameters"] for run in runs.values() if run.rounds} == {151_306}
    for side, processes in {"one-core": 1, "horovod-mpi": 2, "plain-gloo": 2, "parameter_server": 4}.items():
        found = runs[side].rounds[0].figures
        assert len(found["windows_ms"]) == 1
        assert found["windows_ms"][0] > 0
        assert 0 < found["cpu_s"] < 60
        assert 0 <= found["kernel_share"] < 1
        assert found["page_faults"] >= 0
        assert len(found["peak_rss_mib"]) == processes
        assert min(found["peak_rss_mib"]) > 100
    assert sum(size["bytes"] for size in runs["one-core"].facts["gradients"]) == 4 * 151_306
    ours, plain = (runs[side].facts["settings"] for side in ("horovod-mpi", "plain-gloo"))
    assert ours["HOROVOD_FUSION_THRESHOLD"] == str(16 * 2**20)
    assert "HOROVOD_FUSION_THRESHOLD" not in plain, "the hand-written loop has Horovod's own settings"
    assert plain["threads"] == ours["threads"]
    assert plain["cores of rank 0"] == ours["cores of rank 0"]


def test_the_parts_add_up_to_a_step(folder):
    runs = sides_of(folder)
    (parts,) = runs["horovod-mpi"].figure("breakdown_ms")
    assert set(parts) == {"forward and backward", "exchange", "input", "update"}
    assert parts["forward and backward"] > 0
    assert sum(parts.values()) > 0
    assert not runs["plain-gloo"].figure("breakdown_ms")


def test_the_report_holds_both_and_refuses_ratios_of_one_round(folder):
    text = (folder / "report.md").read_text()
    assert "| horovod-mpi |" in text
    assert "1 round: fewer than 3 do not show how noisy it was" in text
    assert "## Collectives, 2 ranks" in text
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3  # no efficiency was told: its picture is left out
    facts = json.loads((folder / "results.json").read_text())["environment"]["packages"]
    assert f"| tensorflow | {facts['tensorflow']} |" in text


def test_collectives_were_measured(folder):
    found = read_results(folder).comparisons["collectives"]
    times = series_of(found)
    for size in (1000, 64_000):
        for engine, name in (("mpi4py", "allreduce"), ("mpi4py", "reducescatter"), ("memory", "add")):
            assert times[engine, name, size][0] > 0
        for name in ("allreduce", "alltoall"):
            assert times["tf-ring", name, size][0] > 0
    (run,) = (run for run in found.runs if run.name == "tf-ring")
    assert set(run.facts["unavailable"]) == {"reducescatter"}, "TensorFlow has it on GPUs only"


def test_a_printed_command_can_be_repeated(folder, tmp_path):
    commands = re.findall(r"^    (python -m hvdtrain bench side one-core .*)", (folder / "report.md").read_text(), re.M)
    job = hvdtrain("none", 1, *commands[0].split()[3:], cwd=tmp_path)
    answer = json.loads(job.out[job.out.index("{") :])
    assert len(answer["figures"]["windows_ms"]) == 1


def test_compare_shows_that_nothing_changed(folder, tmp_path):
    job = hvdtrain("none", 1, "bench", "compare", str(folder), str(folder / "results.json"), cwd=tmp_path)
    assert job.code == 0, job.text
    assert re.search(
        r"^\| horovod-mpi \| digits, 2 ranks, batch 16 \| windows_ms \|.* 1\.000 \| too few rounds \|$", job.out, re.M
    )
    assert not list(tmp_path.iterdir())


def test_horovods_own_collectives_come_out_right(tmp_path):
    """Every engine checks what comes out before it is timed."""
    every = ["allreduce", "allgather", "reducescatter", "alltoall", "broadcast"]
    words = ["bench", "engine", "horovod-gloo", "--collectives", *every, "--sizes", "1KB"]
    job = hvdtrain("gloo", 2, *words, cwd=tmp_path)
    assert job.code == 0, job.text[-4000:]
    answer = json.loads(job.out[job.out.index("{") :])
    assert set(answer["figures"]["ms"]) == {f"{name} 1000" for name in every}


def test_layouts_of_ranks_are_compared(tmp_path):
    words = "--parallel --model tiny --layouts tp --controllers gloo --rounds 1 --steps 40"
    hvdtrain("none", 1, "bench", *words.split(), cwd=tmp_path)
    (made,) = (tmp_path / "bench").iterdir()
    runs = {run.name: run for run in read_results(made).comparisons["parallel"].runs}
    assert list(runs) == ["dp", "one-core", "no-exchange", "tp"]
    one = runs["one-core"]
    for run in runs.values():
        assert run.facts["parameters"] == one.facts["parameters"]
        found = run.rounds[0].figures
        assert min(found["windows_ms"]) > 0
        assert len(found["peak_rss_mib"]) == (1 if run is one else 2)
        formula = sent_mb(run.name, "tiny", 2, run.facts["parameters"])
        assert "sent_mb" not in found if run is one else found["sent_mb"] >= formula / 2, run.name
    assert runs["no-exchange"].figure("sent_mb") < runs["dp"].figure("sent_mb")
    assert one.command.startswith("python -m hvdtrain bench layout ")
    text = (made / "report.md").read_text()
    assert text.count("\n| tp | ") == 1
    assert "bench layout lm_synthetic" in text


def test_a_comparison_that_is_told_to_end_takes_its_launch_with_it(tmp_path):
    words = "bench --parallel --model tiny --layouts dp --rounds 1 --steps 100000"
    command = [sys.executable, "-m", "hvdtrain", *words.split()]
    with Job(command, cwd=tmp_path) as job:
        bench = psutil.Process(job.process.pid)
        begin = awake_seconds()
        while len(started := bench.children(recursive=True)) < 3:  # the launcher and its ranks
            assert awake_seconds() - begin < 120
            time.sleep(0.2)
        job.process.terminate()
        assert job.wait() == 143
    _, left = psutil.wait_procs(started, timeout=120)
    assert not left


def test_a_backend_that_is_not_there_is_refused_in_a_line(tmp_path):
    words = ["bench", "side", "single", "digits", "--batch", "16", "--ranks", "2"]
    job = hvdtrain("mpirun", 2, *words, cwd=tmp_path, code=None)
    assert job.code != 0
    assert job.err.count("hvdtrain: error:") == 1
    assert "--backend single trains in one process" in job.err
