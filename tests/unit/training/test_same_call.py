"""Calls are compared over the ranks before anything else is done."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses, metrics

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.hashes import checksum
from hvdtrain.training.agreement import agree_on_call, settings_of
from hvdtrain.training.compile_settings import Objective
from hvdtrain.training.evaluation.evaluate import broadcast_first_weights
from hvdtrain.training.options import StepOptions
from hvdtrain.training.plan import Plan
from tests.unit.gathering import on_ranks


def said(*arguments):
    """Return the one message with which ranks that give these arguments refuse; "" where they do not."""
    outcomes = on_ranks(len(arguments), lambda backend: agree_on_call(backend, "fit", arguments[backend.index]))
    assert len({str(outcome) for outcome in outcomes}) == 1
    assert isinstance(outcomes[0], ConfigError | None)
    return "" if outcomes[0] is None else str(outcomes[0])


def test_one_process_compares_nothing():
    class Silent(SingleBackend):
        def gather_bytes(self, payload, *, timeout, among="job"):
            raise AssertionError("there is nobody to meet")

    agree_on_call(Silent(None), "fit", {"epochs": 1})
    assert broadcast_first_weights({}, Silent(None)) is False


def test_each_argument_that_differs_is_named_with_its_values_and_ranks():
    message = said({"epochs": 1, "batch": 8, "x": 1}, {"epochs": 2, "batch": 8, "x": 1}, {"epochs": 1, "batch": None})
    assert message == (
        "Every rank calls fit() with the same arguments. Received: epochs is 1 on ranks 0, 2 but 2 on rank 1; "
        "batch is 8 on ranks 0-1 but None on rank 2; x is 1 on ranks 0-1 but not given on rank 2."
    )


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 1


@pytest.mark.parametrize(
    ("value", "same", "other"),
    [
        (np.zeros(3), (np.ones(5), [1, 2]), None),
        ({"x": np.zeros(3)}, {"x": np.ones(2)}, None),
        (tf.data.Dataset.range(3), tf.data.Dataset.range(4), np.zeros(3)),
        (Batches(), Batches(), tf.data.Dataset.range(3)),
        (lambda: 1, print, None),
        ({0: 2.0, 1: np.float32(1)}, {1: np.float32(1), 0: 2.0}, {0: 3.0}),
        (Plan(3), Plan(3), Plan(3, checkpoint_every=1)),
        (True, True, False),
        (3, np.int64(3), np.int64(4)),
        (np.float32(0.5), 0.5, np.float64(0.25)),
        ({0: 1.0}, {np.int64(0): np.float32(1)}, {0: np.float32(2)}),
        (Plan(3), Plan(np.int64(3)), Plan(np.int64(4))),
    ],
)
def test_of_data_the_kind_is_compared_and_of_plain_values_the_value(value, same, other):
    assert said({"given": value}, {"given": same}) == ""
    assert "given is " in said({"given": value}, {"given": other})


def test_another_call_is_named_and_nothing_else():
    calls = on_ranks(2, lambda backend: agree_on_call(backend, ["fit", "predict"][backend.index], {"a": backend.index}))
    assert {str(error) for error in calls} == {
        "Every rank makes the same calls. Received: the call is fit() on rank 0 but predict() on rank 1."
    }


@pytest.mark.parametrize("other", [b"", b"\xff", b"[]", b"3"])
def test_a_rank_that_does_something_else_is_noticed(other):
    class Meeting(SingleBackend):
        size = 2

        def gather_bytes(self, payload, *, timeout, among="job"):
            return [payload, other]

    with pytest.raises(ConfigError, match=r"fit\(\) was called, and another rank did something else"):
        agree_on_call(Meeting(None), "fit", {"epochs": 1})


def settings(optimizer=None, seed=0, callbacks=(), loss="mse", **options):
    optimizer, objective = optimizer or keras.optimizers.SGD(0.1), Objective(loss, options.pop("metrics", ()))
    return settings_of(seed, StepOptions(**options), optimizer, objective=objective, callbacks=callbacks)


def test_what_is_broadcast_or_counted_up_may_differ():
    assert settings(keras.optimizers.SGD(0.1)) == settings(keras.optimizers.SGD(0.2))
    assert settings(callbacks=[keras.callbacks.CSVLogger("x")]) == settings()
    assert settings(callbacks=[keras.callbacks.EarlyStopping()]) == settings()
    twice = [settings(loss={"a": losses.Huber(2.0), "b": None}, metrics=[[metrics.AUC()]]) for _ in range(2)]
    assert twice[0] == twice[1]
    assert settings(loss=lambda y, p: p, metrics=["mae"]) == settings(loss=lambda y, p: y, metrics=("mae",))


@pytest.mark.parametrize(
    "different",
    [
        {"seed": 1},
        {"accumulate": 2},
        {"optimizer": keras.optimizers.SGD(0.1, momentum=0.5)},
        {"optimizer": keras.optimizers.Adam(0.1)},
        {"optimizer": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, nesterov=True))},
        {"optimizer": keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, 10))},
        {"callbacks": [[keras.callbacks.EarlyStopping(restore_best_weights=True)]]},
        {"callbacks": [keras.callbacks.ReduceLROnPlateau()]},
        {"loss": "mae"},
        {"loss": losses.Huber()},
        {"loss": ["mse"]},
        {"metrics": ["mae"]},
    ],
)
def test_what_is_not_must_be_the_same(different):
    assert settings(**different) != settings()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (losses.Huber(1.0), losses.Huber(2.0)),
        (losses.CategoricalCrossentropy(), losses.CategoricalCrossentropy(label_smoothing=0.1)),
        ({"a": "mse", "b": "mae"}, {"a": "mae", "b": "mse"}),
        (losses.mean_squared_error, losses.mean_absolute_error),
    ],
)
def test_losses_are_told_by_their_arguments(one, other):
    assert settings(loss=one) != settings(loss=other)


def test_an_optimizer_without_a_configuration_is_told_by_its_class():
    class Mine(keras.optimizers.SGD):
        def get_config(self):
            raise NotImplementedError

    assert settings(Mine())["the optimizer"] == "Mine"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool"])
def test_the_checksum_is_of_all_values_by_path(dtype):
    def variables(*values):
        return {name: tf.Variable(tf.cast(value, dtype)) for name, value in zip("ab", values, strict=True)}

    first = variables([[0, 1], [1, 0]], 1)
    assert checksum(first) == checksum(dict(reversed(variables([[0, 1], [1, 0]], 1).items())))
    assert checksum(first) != checksum(variables([[0, 1], [1, 1]], 1))
    assert checksum(first) != checksum(variables([[0, 1], [1, 0]], 0))
    first["a"].assign(tf.ones_like(first["a"]))
    assert bool(tf.reduce_all(first["a"] == tf.ones_like(first["a"]))), "a variable can be changed after it was read"
