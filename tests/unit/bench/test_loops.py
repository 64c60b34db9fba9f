"""What is measured, in one process: the hand-written loop, and the variants of a step."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.bench.plain import PlainLoop
from hvdtrain.bench.suite import bench_config
from hvdtrain.bench.timing import Timing, Usage, window
from hvdtrain.bench.trained import PARTS, Metered, NoUpdate, Stopwatch, measure, parts_of
from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.training.step.contract import LocalGradients

pytestmark = pytest.mark.usefixtures("session")

DLRM = replace(
    bench_config("dlrm", batch=8),
    model=ModelConfig("dlrm", {"rows": 20, "dim": 4, "width": 8}),
    data=DataConfig("synthetic_clicks", {"rows": 20, "samples": 64, "fields": 3}, batch=8),
)
MLP = replace(
    bench_config("mlp", batch=8, accumulate=2),
    model=ModelConfig("mlp", {"depth": 1, "width": 8}),
    data=DataConfig("synthetic_images", {"size": 4, "samples": 64}, batch=8),
)


def test_the_plain_loop_trains_and_knows_its_gradients():
    loop = PlainLoop(DLRM, detect_environment({}))
    before = [v.numpy() for v in loop.model.trainable_variables]
    assert window(loop.step(), 4) > 0
    moved = [not np.array_equal(a, v.numpy()) for a, v in zip(before, loop.model.trainable_variables, strict=True)]
    assert all(moved)
    sizes = loop.gradient_sizes()
    tables = [size for size in sizes if "rows_per_sample" in size]
    assert tables == [{"bytes": 20 * 4 * 4, "rows_per_sample": 1.0, "row_bytes": 4 * 4 + 4}] * 3
    assert sum(size["bytes"] for size in sizes) == 4 * sum(
        int(np.prod(v.shape)) for v in loop.model.trainable_variables
    )


def test_the_plain_loop_computes_in_the_precision_it_is_asked_for():
    import keras

    narrow = replace(MLP, training=replace(MLP.training, precision="mixed_bfloat16"))
    loop = PlainLoop(narrow, detect_environment({}))
    assert loop.model.get_layer("hidden0").compute_dtype == "bfloat16"
    assert keras.config.dtype_policy().name == "float32", "others are not to find another policy"


@pytest.mark.parametrize("steps", [pytest.param(1, marks=pytest.mark.extended), 2])
def test_what_a_side_answers(session, steps):
    figures, facts = measure(session, MLP, Timing(steps=steps, windows=3, warm_up=1, breakdown=steps == 1))
    assert len(figures["windows_ms"]) == 3
    assert facts["parameters"] == 48 * 8 + 8 + 8 * 10 + 10
    assert figures["cpu_s"] > 0
    assert 0 <= figures["kernel_share"] < 1
    assert figures["page_faults"] >= 0
    assert len(figures["peak_rss_mib"]) == 1
    assert set(figures.get("breakdown_ms", {})) == (set(PARTS) if steps == 1 else set())


def test_the_parts_are_the_differences_of_the_variants_and_add_up():
    times = {"whole": [10.0, 12.0, 11.0], "batch": [9.5] * 3, "alone": [6.0] * 3, "passes": [5.0] * 3}
    parts = parts_of(times)
    assert parts == {"forward and backward": 5.0, "exchange": 3.5, "input": 1.5, "update": 1.0}
    assert sum(parts.values()) == 11.0


def test_without_an_update_the_gradients_are_there_and_nothing_changes():
    variable, slope = tf.Variable([1.0, 2.0]), tf.Variable(3.0)

    @tf.function
    def step():
        # Nothing but the result asks for these: what it does not depend on is not computed.
        rows = tf.IndexedSlices(variable * slope, tf.constant([0, 1]))
        local = LocalGradients([variable * slope, rows, None], tf.constant([1.0, 2.0, 0.0]), tf.constant(2.0), True)
        return NoUpdate().update(local, measure=False)[0]

    assert step().numpy().tolist() == [7.0, 8.0, 6.0]
    assert NoUpdate().slices == 1
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_usage_is_noted_between_the_counted_steps(monkeypatch):
    class Data:
        steps_per_epoch, pass_steps, batch, remedy = 5, 5, 8, ""

        def batches(self, start_step):
            while True:
                yield start_step

    class Served:
        """Others, which take six seconds in the kernel and 600 page faults between any two looks."""

        looks = 0

        def usage(self):
            self.looks += 1
            return Usage(system_s=6.0 * self.looks, page_faults=600 * self.looks)

    totals = iter([2_000_000, 3_000_000])
    monkeypatch.setattr("hvdtrain.bench.trained.sent_to_itself", lambda: next(totals))
    data = Metered(Data(), Timing(steps=2, windows=3, warm_up=1), Served())
    stream = data.batches(0)
    for step in range(9):
        next(stream)
        if step >= 2:
            sum(n * n for n in range(20_000))
    used, sent = data.used()
    assert sent == 1_000_000
    assert 0 < used.user_s < 6, "of six steps"
    assert 6 <= round(used.system_s, 6) < 12
    assert 600 <= used.page_faults < 6000


def test_windows_are_timed_without_what_is_done_between_them():
    called = []
    watch = Stopwatch(3, lambda: called.append(len(watch.windows_ms)))
    for step in range(1, 8):
        watch.on_progress(step)
    assert len(watch.windows_ms) == 2
    assert called == [1, 2]
