"""Which points a comparison of steps has, and its throughput, ratios, efficiencies and bytes against their formulas."""

import pytest

from hvdtrain.bench.results import Refused
from hvdtrain.bench.suite import MODELS, Point, bench_config, job_of, points
from hvdtrain.bench.suite_report import figures, sent_bytes
from hvdtrain.config.errors import ConfigError
from tests.unit.bench.bench_results import PARTS, run, suite


def matrix(sides=("horovod-mpi",), models=("mlp",), ranks=(2,), **more):
    return points(sides=sides, models=models, ranks=ranks, **more)


def refused(found):
    return {point.side: point.refusal for point in found if point.refusal is not None}


def test_at_the_largest_number_of_ranks_strong_and_weak_scaling_are_one_run():
    assert matrix() == [
        Point("one-core", "mlp", 1, 64),  # what the step takes
        Point("one-core", "mlp", 1, 32),  # what a rank takes
        Point("horovod-mpi", "mlp", 2, 64),
    ]


def test_fewer_ranks_take_the_whole_batch_and_their_share():
    found = matrix(ranks=[2, 4])
    assert [(p.ranks, p.batch) for p in found if p.side == "horovod-mpi"] == [(2, 64), (2, 32), (4, 64)]
    assert {p.batch for p in found if p.side == "one-core"} == {64, 32, 16}


def test_with_one_kind_of_scaling_nothing_else_is_run():
    strong, weak = (matrix(ranks=[2, 4], scalings=[kind]) for kind in ("strong", "weak"))
    assert {(p.side, p.batch) for p in strong} == {("one-core", 64), ("horovod-mpi", 64)}
    assert {(p.side, p.batch) for p in weak} == {("one-core", 16), ("horovod-mpi", 32), ("horovod-mpi", 64)}


def test_accumulation_leaves_the_microbatch_as_it_is():
    found = matrix(["horovod-mpi", "plain-mpi"], ["lm"], accumulations=[1, 4])
    ours = [p for p in found if p.side == "horovod-mpi"]
    assert [(p.batch, p.accumulate) for p in ours] == [(8, 1), (32, 4)]
    plain = [p for p in found if p.side == "plain-mpi"]
    assert [p.refusal is None for p in plain] == [True, False]
    assert "accumulation" in plain[1].refusal
    assert {p.batch for p in found if p.side == "one-core"} == {8, 4}


def test_what_a_side_cannot_do_is_refused_with_the_reason():
    found = matrix(["single", "mirrored", "plain-gloo"], precisions=["mixed_float16"])
    assert [p.side for p in found if p.refusal is None] == ["mirrored"]
    reasons = refused(found)
    assert "one replica" in reasons["single"]
    assert "loss scaling" in reasons["plain-gloo"]
    assert "loss scaling" in reasons["one-core"]


def test_workers_have_a_chief_and_a_server_beside_them():
    (served,) = (point for point in matrix(["parameter_server"]) if point.side == "parameter_server")
    words = job_of(served).command
    assert words[words.index("-np") + 1] == "4"
    assert words[words.index("--ranks") + 1] == "2", "the cores are those of two ranks, as for the others"


def test_each_point_runs_once_however_often_it_is_named():
    found = matrix(["horovod-mpi", "one-core", "horovod-mpi"], ["mlp", "mlp"], [2, 2])
    assert len(found) == len(set(found)) == 3


def test_a_batch_must_divide_among_the_ranks():
    with pytest.raises(ConfigError, match="--batch"):
        matrix(batch=7)


def test_the_command_of_a_point_names_all_of_it():
    point = Point("horovod-gloo", "lm", 2, 32, "mixed_bfloat16", 4)
    job = job_of(point, windows=3, warm_up=1, steps=7, cores=2)
    assert job.command[:4] == ["horovodrun", "--gloo", "-np", "2"]
    words = "side horovod-gloo lm --batch 32 --ranks 2 --precision mixed_bfloat16 --accumulate 4 --cores 2"
    assert job.shown.endswith(f"{words} --windows 3 --warm-up 1 --steps 7 --breakdown")
    assert job.group == "lm mixed_bfloat16", "the sides of a model and precision take turns"
    assert "--breakdown" not in job_of(Point("plain-mpi", "lm", 2, 8)).command
    assert job_of(Point("mirrored", "lm", 2, 8)).shown.startswith("python -m hvdtrain bench side mirrored")


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_batch_that_halves(name):
    config = bench_config(name, batch=8, precision="mixed_bfloat16", accumulate=2)
    assert (config.data.batch, config.training.precision, config.training.accumulate) == (8, "mixed_bfloat16", 2)
    assert MODELS[name].data.batch % 8 == 0
    assert config.optim.schedule == "constant"


# -- figures --


def of(side, runs, baseline="plain-mpi"):
    measured = [each for each in runs if each.rounds]
    return figures(next(each for each in measured if each.name == side), measured, baseline)


def test_figures_of_a_side():
    found = of("horovod-mpi", suite().runs)
    assert found.step_ms.median == 125.0
    assert found.rate.median == pytest.approx(64 / 0.125)
    assert found.rate.low < found.rate.median < found.rate.high
    assert found.ideal_rate == pytest.approx(2 * 64 / 0.2)
    assert found.ratio.median == pytest.approx(0.5)
    # One process takes 64 samples in 200 ms and 32 in 102 (or, round by round, 104, 100, 102).
    assert found.strong.median == pytest.approx(200 / (2 * 125))
    assert found.weak.median == pytest.approx(102 / 124, rel=0.01)
    assert found.breakdown_ms == PARTS


def test_bytes_on_the_wire_of_each_kind_of_side():
    # 1 MB dense; rows: 32 samples x 2 rows x 68 bytes.
    assert of("horovod-mpi", suite().runs).sent_bytes == 1_000_000 + 4352
    assert of("plain-mpi", suite().runs).sent_bytes == 1_000_000 + 4352
    assert of("one-core", suite().runs).sent_bytes is None


def test_sparse_gradients_travel_as_their_side_sends_them():
    small, large = ({"bytes": size, "rows_per_sample": 2.0, "row_bytes": 68} for size in (64_000, 100_000_000))
    few = {"traffic": "ring", "processes": 4, "samples": 8}
    assert sent_bytes([small], gathers=False, **few) == 2 * 3 / 4 * 64_000
    assert sent_bytes([small], gathers=True, **few) == 3 * 8 * 2 * 68
    assert sent_bytes([large], gathers=False, **few) == 3 * 8 * 2 * 68
    assert sent_bytes([large], gathers=False, **{**few, "samples": 1_000_000}) == 2 * 3 / 4 * 100_000_000
    assert sent_bytes([large, {"bytes": 10}], gathers=False, **{**few, "traffic": "server"}) == 1088 + 10
    assert sent_bytes([large], gathers=False, **{**few, "traffic": "none"}) is None


def test_without_baseline_or_ideal_the_reason_is_told():
    found = of("horovod-mpi", [run("horovod-mpi", 10.0, 10.0, 10.0)])
    assert found.ratio == Refused("plain-mpi was not measured")
    assert found.strong == Refused("one-core was not measured on 64 samples")
    assert found.weak == Refused("one-core was not measured on 32 samples")
    assert found.sent_bytes is None


def test_accumulation_is_counted_by_microbatches():
    ideal = run("one-core", 100.0, 100.0, 100.0, ranks=1)
    found = of("horovod-mpi", [ideal, run("horovod-mpi", 250.0, 250.0, 250.0, batch=256, accumulate=4)])
    assert found.strong.median == pytest.approx((256 / 250) / (2 * 64 / 100))


def test_noise_reaches_the_figures():
    runs = [run("plain-mpi", 10.0, 10.0, 10.0), run("horovod-mpi", 5.0, 8.0, 11.0)]
    assert "too noisy" in of("horovod-mpi", runs).ratio.reason
    busy = [run("plain-mpi", 10.0, 10.0, 10.0, foreign=1.0), run("horovod-mpi", 5.0, 5.0, 5.0, foreign=1.0)]
    assert "other programs" in of("horovod-mpi", busy).ratio.reason
