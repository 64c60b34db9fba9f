"""Calls other than an ordinary `fit`, by Keras in one process and by the trainer on all ranks."""

import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same, assert_trained_as_keras
from world import World, computing_in, refused
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError, DesyncError

RNG = np.random.default_rng(0)
SAMPLES = 22
X, Y = RNG.standard_normal((SAMPLES, 4)), RNG.standard_normal((SAMPLES, 1))


def dense() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(3, activation="tanh")(inputs)))


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> Any:
        return X[4 * number : 4 * number + 4], Y[4 * number : 4 * number + 4]


def one_by_one() -> Iterator[Any]:
    for number in range(6):
        yield (Batches()[number][0],)


class Forms(keras.Model):
    """Rows of samples, pairs of rows, a mean over the batch, text, complex numbers, and what is ragged."""

    def call(self, inputs: Any) -> dict[str, Any]:
        return {
            "rows": inputs * 2,
            "pairs": tf.repeat(inputs, 2, axis=0),
            "text": tf.strings.as_string(inputs, precision=3),
            "complex": tf.complex(inputs, -inputs),
            "small": tf.cast(inputs > 0, tf.uint32),
            "ragged": tf.ragged.boolean_mask(inputs, inputs > 0),
        }


class WithMean(Forms):
    def call(self, inputs: Any) -> dict[str, Any]:
        return {**super().call(inputs), "mean": tf.reduce_mean(inputs, 0), "total": tf.reduce_sum(inputs)}


NUMBERS = np.minimum(np.arange(SAMPLES), 18)


class Trimmed(keras.Model):
    """As many columns as the largest number of the batch."""

    def call(self, inputs: Any) -> Any:
        return tf.sequence_mask(inputs, dtype="float64")


def without_ragged(outputs: Any) -> Any:
    return tf.nest.map_structure(
        lambda each: each.to_tensor(-1).numpy() if isinstance(each, tf.RaggedTensor) else each, outputs
    )


def check_predictions_are_those_of_keras(world: World) -> None:
    with computing_in("float64"):
        for build, data, options in (
            (dense, Batches, {}),
            (dense, one_by_one, {}),
            (dense, lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(5), {"steps": 3}),
            (Forms, lambda: tf.data.Dataset.from_tensor_slices(X).batch(5), {}),
            (WithMean, lambda: tf.data.Dataset.from_tensor_slices(X).batch(8), {}),
            (Trimmed, lambda: tf.data.Dataset.from_tensor_slices(NUMBERS).batch(8), {}),
        ):
            model = build()  # not compiled
            trainer = hvdtrain.Trainer(model, backend=world.backend)
            ours = trainer.predict(data if data is one_by_one else data(), **options)
            theirs = model.predict(data(), verbose=0, **options)
            assert_same(*map(without_ragged, (ours, theirs)), f"{build.__name__} {data}")
        model = dense()
        model.compile(None, "mse", metrics=["mae"])
        ours = hvdtrain.Trainer(model, backend=world.backend).evaluate(X, Y, batch=5, verbose=0)
        assert_same(ours, model.evaluate(X, Y, batch_size=5, verbose=0), "evaluate without an optimizer")


@worlds("mpirun-2", "gloo-4", extended=True, why="slices of single batches")
def check_single_batches_are_those_of_keras(world: World) -> None:
    with computing_in("float64"):
        theirs, ours = dense(), dense()
        for model in (theirs, ours):
            model.compile(keras.optimizers.SGD(0.1), "mse", metrics=["mae"])
        trainer = hvdtrain.Trainer(ours, backend=world.backend)
        for rows in (SAMPLES, 9, 1):
            expected = theirs.train_on_batch(X[:rows], Y[:rows])
            assert_same(trainer.train_on_batch(X[:rows], Y[:rows]), expected, f"{rows} rows")
        assert_same(ours.get_weights(), theirs.get_weights(), "weights")
        assert_same(trainer.test_on_batch(X, Y), theirs.test_on_batch(X, Y), "test")
        assert_same(trainer.predict_on_batch(X), theirs.predict_on_batch(X), "predict")
        ours.layers[-1].bias.assign([float(world.rank)])
        with refused("After step 4 every rank must hold the same weights", DesyncError):
            trainer.train_on_batch(X, Y)


@worlds("mpirun-2", extended=True, why="the data's place in passes")
def check_epochs_within_a_pass_are_those_of_keras(world: World) -> None:
    for arguments in (
        lambda: {"x": X, "y": Y, "batch_size": 4, "steps_per_epoch": 3},
        lambda: {"x": X, "y": Y, "steps_per_epoch": 11},
        lambda: {"x": Batches(), "steps_per_epoch": 6},
        lambda: {"x": Batches(), "steps_per_epoch": 2},
        lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(4), "steps_per_epoch": 2},
    ):
        assert_trained_as_keras(
            world,
            dense,
            lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"},
            lambda arguments=arguments: {"shuffle": False, "epochs": 3, **arguments()},
        )


class Noted(keras.callbacks.Callback):
    """Notes the number and figures of each batch that ends; Keras begins one more where it does not know how many."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.seen = seen

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(logs or {})))

    on_test_batch_end = on_train_batch_end


@worlds("mpirun-2")
@worlds("gloo-4", extended=True, why="ranks without samples of a last batch")
def check_several_steps_in_a_call_are_those_of_keras(world: World) -> None:
    """Of 22 samples: the last batch of 4 has two, and the last call of 4 steps as many."""
    dataset = tf.data.Dataset.from_tensor_slices((X, Y))
    for data in (
        {"x": X, "y": Y, "batch_size": 4},
        {"x": Batches()},
        {"x": dataset.batch(4)},
        {"x": dataset.filter(lambda x, y: x[0] < 1).batch(4)},
    ):
        seen: dict[str, list[Any]] = {"theirs": [], "ours": []}
        sides = iter(["ours", "theirs"])  # in the order in which both are called
        assert_trained_as_keras(
            world,
            dense,
            lambda: {
                "optimizer": keras.optimizers.Adam(0.1),
                "loss": "mse",
                "metrics": ["mae"],
                "steps_per_execution": 4,
            },
            lambda data=data, sides=sides, seen=seen: {
                **{"shuffle": False, "epochs": 2, "validation_data": dataset.batch(3), **data},
                "callbacks": [Noted(seen[next(sides)])],
            },
        )
        ours, theirs = ([each for each, _ in found] for found in (seen["ours"], seen["theirs"]))
        assert ours == theirs, f"{ours} for {theirs}"
        assert_same([figures for _, figures in seen["ours"]], [figures for _, figures in seen["theirs"]], "figures")


@worlds("mpirun-2", extended=True, why="states of samples, which ranks have slices of")
def check_recurrent_states_are_refused(world: World) -> None:
    inputs = keras.Input(batch_shape=(4, 5, 2))
    model = keras.Model(inputs, keras.layers.LSTM(3, stateful=True)(inputs))
    with refused("it carries the state of each sample", ConfigError):
        hvdtrain.Trainer(model, "sgd", "mse", backend=world.backend)


def sparse_inputs() -> tf.SparseTensor:
    return tf.sparse.from_dense(np.where(X > 0.5, X, 0))


def ragged_inputs() -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_lengths(np.arange(2 * SAMPLES) % 9, np.tile([1, 3], SAMPLES // 2))


def of_sparse() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,), sparse=True)
    return keras.Model(inputs, keras.layers.Dense(1)(inputs))


def of_ragged() -> keras.Model:
    keras.utils.set_random_seed(0)
    inputs = keras.Input((None,), dtype="int64")
    embedded = keras.layers.Embedding(9, 3)(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(embedded)))


@worlds("mpirun-2", "gloo-4", extended=True, why="rows that are gathered and sliced in their own ways")
def check_ragged_and_sparse_inputs_are_trained_as_by_keras(world: World) -> None:
    scipy = importlib.import_module("scipy.sparse") if importlib.util.find_spec("scipy") else None
    cases = [(of_sparse, sparse_inputs), (of_ragged, ragged_inputs)]
    if scipy is not None:
        cases.append((of_sparse, lambda: scipy.csr_matrix(np.where(X > 0.5, X, 0))))
    for build, data in cases:
        arrays = {"x": data(), "y": Y, "batch_size": 8, "shuffle": False, "epochs": 2}
        batches = {"x": lambda data=data: tf.data.Dataset.from_tensor_slices((data(), Y)).batch(8), "epochs": 2}
        for arguments in [arrays, *([] if hasattr(arrays["x"], "tocsr") else [batches])]:
            assert_trained_as_keras(
                world,
                build,
                lambda: {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"},
                lambda arguments=arguments: {
                    name: value() if callable(value) else value for name, value in arguments.items()
                },
                predict=lambda data=data: {"x": data()},
            )
