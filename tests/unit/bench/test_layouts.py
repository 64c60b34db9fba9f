"""`bench --parallel`: the jobs, the formulas and the report."""

import math
import os

import pytest

from hvdtrain.bench.engine import Answer, LaunchFailed, measure
from hvdtrain.bench.layouts import job_of, layouts, section, sent_mb
from hvdtrain.bench.report import Figure, render
from hvdtrain.bench.results import Comparison
from hvdtrain.bench.timing import Timing
from hvdtrain.cli.bench_launch import parse_layout
from hvdtrain.config.parallel import parse_axes

NAMES = ("dp", "one-core", "no-exchange", "tp", "pp")


def launched(job):
    """Answer as two ranks would: one core in 16 ms, tp in 5, without an exchange in 8; pipelines fail."""
    if job.name == "pp":
        raise LaunchFailed("a stage is missing")
    figures = {"windows_ms": [{"tp": 5.0, "one-core": 16.0, "no-exchange": 8.0}.get(job.name, 10.0)]}
    figures |= {"peak_rss_mib": [400.0, 600.0 if job.name == "dp" else 500.0]}
    return Answer(figures | ({} if job.name == "one-core" else {"sent_mb": 2.0}), {"parameters": 1000})


def test_the_report_has_ratios_bytes_and_a_picture():
    jobs = [job_of(name, model="tiny", controller="gloo", ranks=2, steps=3) for name in NAMES]
    runs = measure(jobs, 2, launched, log=lambda line: None)
    blocks = list(section(Comparison("command", {}, runs)))
    text = render(blocks, "md")
    assert "| dp | 10.0 | 10.0 .. 10.0 | 1.00 | 1.25 | 1.25 | 600 | 0 | 0.0 | 2.0 | 2 |" in text
    assert "| one-core | 16.0 | 16.0 .. 16.0 | 1.60 | - | 2.00 | 500 | 100 | - | - | 2 |" in text
    assert "| tp | 5.0 | 5.0 .. 5.0 | 0.50 | 0.62 | 0.62 | 500 | 100 |" in text
    assert "| pp | tiny, 2 ranks, gloo | 0 | a stage is missing |" in text
    (picture,) = [block for block in blocks if isinstance(block, Figure)]
    assert picture.png.startswith(b"\x89PNG")


def test_one_core_has_one_process_and_layouts_of_other_sizes_do_not_take_turns():
    one, two, four = (
        job_of(name, model="tiny", controller="mpi", ranks=ranks, steps=3)
        for name, ranks in (("one-core", 2), ("dp", 2), ("dp", 4))
    )
    assert one.shown.startswith("python -m hvdtrain bench layout lm_synthetic ")
    assert two.shown.startswith("mpirun ")
    assert one.group == two.group != four.group
    words = two.shown.partition(" --steps ")[2]
    assert words == "1 --windows 1", "two windows warm up"
    assert job_of("dp", model="tiny", controller="mpi", ranks=2, steps=30).shown.endswith(" --steps 5 --windows 4")


def test_a_launch_keeps_to_its_cores_and_trains_with_the_options_given():
    """With one thread, but on all cores, TensorFlow used one and a half."""
    before = os.sched_getaffinity(0)
    option, cores = layouts(len(before))["one-core"]
    try:
        request = parse_layout(["lm_synthetic", "--batch", "16", "--steps", "3", option, cores, "--zero", "1"])
        assert os.sched_getaffinity(0) == {min(before)}
    finally:
        os.sched_setaffinity(0, before)
    assert (request.config.data.batch, request.config.update.zero) == (16, 1)
    assert request.timing == Timing(steps=3, windows=4)


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


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_layouts_are_meshes_of_all_ranks(ranks):
    for name, options in layouts(ranks).items():
        if "--parallel" in options:
            sizes = parse_axes(options[options.index("--parallel") + 1])
            assert ranks % math.prod(sizes.values()) == 0, name
        command = job_of(name, model="lm", controller="gloo", ranks=ranks, steps=5).command
        assert command[-len(options) :] == options or not options
