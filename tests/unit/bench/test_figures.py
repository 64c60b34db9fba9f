"""Throughput, efficiency, bytes and bandwidths against their formulas."""

import platform

import pytest

from hvdtrain.bench.bandwidth import algorithm_bandwidth, bus_bandwidth, calls, parsed_size, shown_size
from hvdtrain.bench.calls import expected, input_of
from hvdtrain.bench.catalog import MODELS, bench_config
from hvdtrain.bench.host import environment
from hvdtrain.bench.noise import Refused
from hvdtrain.bench.results import GradientSize
from hvdtrain.bench.statistics import figures, measured
from hvdtrain.bench.timing import process_settings
from hvdtrain.bench.wire import sent_bytes
from hvdtrain.runtime.tuning import LARGE_MESSAGES
from tests.unit.bench.bench_results import PARTS, cell, suite


def of(side, cells, baseline="plain-mpi"):
    return figures(next(c for c in cells if c.side == side and c.rounds), cells, baseline)


def test_figures_of_a_side():
    found = of("horovod-mpi", measured(suite()))
    assert found.step_ms.median == 125.0
    assert found.samples_per_second == pytest.approx(64 / 0.125)
    assert found.ideal_per_second == pytest.approx(2 * 64 / 0.2)
    assert found.ratio.median == pytest.approx(0.5)
    # One process takes 64 samples in 200 ms and 32 in 102 (or, round by round, 104, 100, 102).
    assert found.strong.median == pytest.approx(200 / (2 * 125))
    assert found.weak.median == pytest.approx(102 / 124, rel=0.01)
    assert found.cpu_s == pytest.approx(0.275)
    assert found.peak_rss_mib == 510.0
    assert found.breakdown_ms == PARTS


def test_bytes_on_the_wire_of_each_kind_of_side():
    cells = measured(suite())
    # 1 MB dense; rows: 32 samples x 2 rows x 68 bytes.
    assert of("horovod-mpi", cells).sent_bytes == 1_000_000 + 4352
    assert of("plain-mpi", cells).sent_bytes == 1_000_000 + 4352
    assert of("one-core", cells).sent_bytes is None


def test_sparse_gradients_travel_as_their_side_sends_them():
    small, large = GradientSize(64_000, 2.0, 68), GradientSize(100_000_000, 2.0, 68)
    few = {"traffic": "ring", "processes": 4, "samples": 8}
    assert sent_bytes([small], gathers=False, **few) == 2 * 3 / 4 * 64_000
    assert sent_bytes([small], gathers=True, **few) == 3 * 8 * 2 * 68
    assert sent_bytes([large], gathers=False, **few) == 3 * 8 * 2 * 68
    many = {**few, "samples": 1_000_000}
    assert sent_bytes([large], gathers=False, **many) == 2 * 3 / 4 * 100_000_000
    assert sent_bytes([large, GradientSize(10)], traffic="server", processes=4, samples=8, gathers=False) == 1088 + 10
    assert sent_bytes([large], traffic="none", processes=1, samples=8, gathers=False) is None


def test_without_baseline_or_ideal_the_reason_is_told():
    cells = [cell("horovod-mpi", 10.0, 10.0, 10.0)]
    found = of("horovod-mpi", cells)
    assert found.ratio == Refused("plain-mpi was not measured")
    assert found.strong == Refused("one-core was not measured on 64 samples")
    assert found.weak == Refused("one-core was not measured on 32 samples")
    assert found.sent_bytes is None


def test_accumulation_is_counted_by_microbatches():
    cells = [
        cell("one-core", 100.0, 100.0, 100.0, ranks=1),
        cell("horovod-mpi", 250.0, 250.0, 250.0, batch=256, accumulate=4),
    ]
    assert of("horovod-mpi", cells).strong.median == pytest.approx((256 / 250) / (2 * 64 / 100))


def test_noise_reaches_the_figures():
    cells = [cell("plain-mpi", 10.0, 10.0, 10.0), cell("horovod-mpi", 5.0, 8.0, 11.0)]
    assert "too noisy" in of("horovod-mpi", cells).ratio.reason
    busy = [cell("plain-mpi", 10.0, 10.0, 10.0, foreign=1.0), cell("horovod-mpi", 5.0, 5.0, 5.0, foreign=1.0)]
    assert "other programs" in of("horovod-mpi", busy).ratio.reason


def test_bandwidths_as_nccl_tests_defines_them():
    # 100 MB in 50 ms are 2 GB/s.
    assert algorithm_bandwidth(100_000_000, 50.0) == pytest.approx(2.0)
    assert bus_bandwidth("allreduce", 100_000_000, 50.0, 4) == pytest.approx(3.0)
    for name in ("allgather", "reducescatter", "alltoall"):
        assert bus_bandwidth(name, 100_000_000, 50.0, 4) == pytest.approx(1.5)
    assert bus_bandwidth("broadcast", 100_000_000, 50.0, 4) == pytest.approx(2.0)
    assert bus_bandwidth("add", 100_000_000, 50.0, 4) is None


def test_sizes():
    assert [parsed_size(text) for text in ("1KB", "16mb", "2GB", "4000")] == [1000, 16_000_000, 2_000_000_000, 4000]
    assert [shown_size(size) for size in (1000, 64_000, 1_500_000, 2_000_000_000)] == [
        "1 KB",
        "64 KB",
        "1.5 MB",
        "2 GB",
    ]
    for wrong in ("0", "-5MB", "many", "999"):
        with pytest.raises(ValueError):  # noqa: PT011
            parsed_size(wrong)
    assert [calls(size) for size in (1000, 16_000_000, 400_000_000)] == [100, 16, 5]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_what_is_given_comes_out_as_the_collective_says(ranks):
    parts = {name: [input_of(name, 1000, rank, ranks) for rank in range(ranks)] for name in ("allreduce", "allgather")}
    assert (sum(parts["allreduce"]) == expected("allreduce", 1000, ranks)).all()
    assert [v for part in parts["allgather"] for v in part] == expected("allgather", 1000, ranks).tolist()
    assert len(expected("reducescatter", 1000, ranks)) * ranks == len(input_of("reducescatter", 1000, 0, ranks))
    assert (input_of("broadcast", 1000, 0, ranks) == expected("broadcast", 1000, ranks)).all()


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_a_batch_that_halves(name):
    config = bench_config(name, batch=8, precision="mixed_bfloat16", accumulate=2)
    assert (config.data.batch, config.training.precision, config.training.accumulate) == (8, "mixed_bfloat16", 2)
    assert MODELS[name].config.data.batch % 8 == 0
    assert MODELS[name].config.optim.schedule == "constant"


def test_settings_name_a_file_of_ours_without_the_folder_it_lies_in():
    told = process_settings(1, LARGE_MESSAGES | {"HOROVOD_CYCLE_TIME": "3"})
    assert told["OMPI_MCA_coll_tuned_dynamic_rules_filename"] == "hvdtrain/runtime/openmpi-allreduce.conf"
    assert told["HOROVOD_CYCLE_TIME"] == "3"
    theirs = {"OMPI_MCA_coll_tuned_dynamic_rules_filename": "/etc/rules.conf"}
    assert process_settings(1, theirs)["OMPI_MCA_coll_tuned_dynamic_rules_filename"] == "/etc/rules.conf"


def test_the_environment_of_a_report_names_no_folder_of_the_machine():
    facts = environment()
    assert facts["python"] == {"version": platform.python_version()}
    assert facts["packages"]["tensorflow"]
