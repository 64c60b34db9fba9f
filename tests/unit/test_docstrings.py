"""The examples in the docstrings of the public names, which the reference shows, run in one process as they stand."""

import inspect
import textwrap

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain

pytestmark = pytest.mark.extended

ELSEWHERE = {
    "init": "a job has one",
    "run": "tests/entry/test_run_function.py",
    "MlflowTracker": "tests/trackers",
    "WandbTracker": "tests/trackers",
    "load_run": "tests/unit/runs/test_loaded.py",
}


def examples() -> dict[str, str]:
    """Return the example of each public name that has one."""
    found = {}
    for name in hvdtrain.__all__:
        text = inspect.getdoc(getattr(hvdtrain, name)).partition("\nExample::\n")[2]
        if text and name not in ELSEWHERE:
            found[name] = textwrap.dedent(text)
    return found


def test_what_takes_arguments_has_an_example():
    without = {"is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "shutdown", "barrier"}
    without |= {"FusedHeads", "LoadedRun"}  # docs/tensor_parallel.md, load_run
    assert set(hvdtrain.__all__) - without == examples().keys() | ELSEWHERE.keys()


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("name", examples())
def test_an_example_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    x, y = rng.random((32, 16), "float32"), rng.integers(0, 8, 32)
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
    loss, optimizer = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.Adam(1e-3)
    names = {"hvdtrain": hvdtrain, "keras": keras, "tf": tf, "x": x, "y": y}
    names |= {"model": model, "loss": loss, "optimizer": optimizer, "step": lambda x, y: loss(y, model(x))}
    names |= {"dataset": [(x[:16], y[:16]), (x[16:], y[16:])], "trainer": hvdtrain.Trainer(model, "adam", loss)}
    names |= {each: rng.random((2, 6, 4, 8), "float32") for each in ("query", "key", "value")}
    exec(examples()[name], names)
