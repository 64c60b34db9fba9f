"""Batches that a user's Python makes train as the same samples in arrays do."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_trained_as_keras
from builders import CROSS_ENTROPY, SAMPLES, dense_data, dense_model
from world import World, exact_arrays, flat_bytes, moved, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import DataError

BATCH = 16


class Batches(keras.utils.PyDataset):
    """Global batches of arrays, in their order."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.arrays = x, y

    def __len__(self) -> int:
        return -(-SAMPLES // BATCH)

    def __getitem__(self, number: int) -> tuple[np.ndarray, ...]:
        return tuple(array[number * BATCH : (number + 1) * BATCH] for array in self.arrays)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_batches_made_in_python(world: World) -> None:
    x, y = dense_data("float64")
    batches = Batches(x, y)

    def generate() -> Any:
        for number in range(len(batches)):
            yield batches[number]

    forms = {
        "arrays": ((x, y), {"batch": BATCH}),
        "dataset": (tf.data.Dataset.from_tensor_slices((x, y)), {"batch": BATCH}),
        "PyDataset": (batches, {}),
        "generator": (generate, {}),
    }
    trained = {}
    for name, (data, options) in forms.items():
        trainer = hvdtrain.Trainer(
            dense_model("float64", world.rank), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend
        )
        trainer.fit(data, epochs=2, shuffle=False, verbose=False, **options)
        loss = trainer.evaluate(data if "batch" not in options else (x, y), batch=BATCH, return_dict=True)["loss"]
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), name
        trained[name] = trainer.model.get_weights(), loss
    weights, loss = trained["arrays"]
    assert moved(weights, dense_model("float64", 0).get_weights()) > 1e-2
    for name, (other, other_loss) in trained.items():
        assert relative_error(other, weights) <= 1e-9, name
        np.testing.assert_allclose(other_loss, loss, rtol=1e-6, err_msg=name)


@exact_arrays()
def check_each_epoch_is_a_pass_over_data_whose_passes_differ(world: World) -> None:
    """A filter by a bound that a callback raises: on all ranks, and on parts of their own."""
    x, y = dense_data("float64")
    level = tf.Variable(0, dtype=tf.int64)

    def batches(part: slice = slice(None), batch: int = 8) -> tf.data.Dataset:
        numbered = tf.data.Dataset.from_tensor_slices((np.arange(SAMPLES)[part], x[part], y[part]))
        return numbered.filter(lambda number, *_: number < level).map(lambda _, x, y: (x, y)).batch(batch)

    def fit(data: Any, *levels: int, **options: Any) -> dict[str, Any]:
        level.assign(levels[0])
        raised = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: level.assign(levels[epoch]))
        return {"x": data, "epochs": 3, "callbacks": [raised], **options}

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.SGD(0.1), "loss": CROSS_ENTROPY}

    def build() -> keras.Model:
        return dense_model("float64", 0)

    assert_trained_as_keras(world, build, compiled, lambda: fit(batches(), 16, 20, 12))
    model, trainer = build(), hvdtrain.Trainer(build(), **compiled(), backend=world.backend)
    model.compile(**compiled())
    model.fit(**fit(batches(), 20, 8, 12), verbose=0)
    part = slice(world.rank, None, world.size)
    trainer.fit(**fit(batches(part, 8 // world.size), 20, 8, 12, shard="rank"), verbose=0)
    np.testing.assert_allclose(trainer.model.get_weights()[0], model.get_weights()[0], rtol=1e-10)


def check_data_that_differ_by_rank_are_refused(world: World) -> None:
    """Each rank's own slice, or arrays of other lengths: refused on every rank, before anything is exchanged."""
    x, y = dense_data("float64")
    slices = x[world.rank :: world.size], y[world.rank :: world.size]
    ends = SAMPLES - BATCH * world.rank
    trainer = hvdtrain.Trainer(
        dense_model("float64", 0), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend
    )
    cases = {
        "slices": (slices, None),
        "lengths": ((x[:ends], y[:ends]), None),
        "a dataset's length": (tf.data.Dataset.from_tensor_slices((x[:ends], y[:ends])), None),
        "validation": ((x, y), (x[:ends], y[:ends])),
    }
    calls: dict[str, Callable[[], Any]] = {
        name: functools.partial(trainer.fit, data, batch=BATCH, validation_data=validation, verbose=False)
        for name, (data, validation) in cases.items()
    }
    calls["inputs"] = functools.partial(trainer.predict, slices[0], batch=BATCH)
    calls["a dataset of inputs"] = functools.partial(trainer.predict, tf.data.Dataset.from_tensors(slices[0]))
    for name, call in calls.items():
        refused = ""
        try:
            call()
        except DataError as error:
            refused = str(error)
        assert ("rank 1" in refused.lower()) == (world.size > 1), (name, refused)
        assert world.same_everywhere(refused.encode()), name


def check_batches_without_samples_are_those_of_keras(world: World) -> None:
    """A batch from which a filter took all samples, and one that is all masked: the penalties of weights count."""
    rng = np.random.default_rng(9)
    x, y = rng.standard_normal((24, 5, 1)), rng.standard_normal((24, 5, 1))
    kept = np.arange(24) // 8 != 1

    def masked() -> keras.Model:
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Masking(), keras.layers.Dense(3, "tanh", kernel_regularizer="l2"), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((5, 1)), *layers])

    def filtered() -> tf.data.Dataset:
        batches = tf.data.Dataset.from_tensor_slices((x, y, kept)).batch(8)
        return batches.map(lambda *arrays: tuple(tf.boolean_mask(each, arrays[-1]) for each in arrays[:2]))

    def zeroed() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((x * kept[:, None, None], y)).batch(8)

    def compiled() -> dict[str, Any]:
        return {"optimizer": keras.optimizers.Adam(0.1), "loss": "mse"}

    def given() -> dict[str, Any]:
        return {"x": filtered()}

    assert_trained_as_keras(world, masked, compiled, given, evaluate=given, predict=given)
    assert_trained_as_keras(world, masked, compiled, lambda: {"x": zeroed()})


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_a_dataset_is_mapped_by_the_rank_that_trains_on_it(world: World) -> None:
    """Each rank decodes its own samples, and the ranks train as one process does on the whole batches."""
    x, y = dense_data("float64")
    called = []

    def decode(row: Any, target: Any, number: Any) -> tuple[Any, Any]:
        def read(row: np.ndarray, number: np.ndarray) -> np.ndarray:
            called.append(int(number))
            return row

        return tf.ensure_shape(tf.numpy_function(read, [row, number], tf.float64, stateful=False), row.shape), target

    order = np.random.default_rng(0).permutation(SAMPLES)
    listed = tf.data.Dataset.from_tensor_slices((x[order], y[order], order))
    weights = []
    for data, options in ((listed.map(decode).batch(BATCH), {}), ((x[order], y[order]), {"batch": BATCH})):
        trainer = hvdtrain.Trainer(
            dense_model("float64", world.rank), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend
        )
        trainer.fit(data, epochs=2, shuffle=False, verbose=False, **options)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        weights.append(trainer.model.get_weights())
    assert moved(weights[1], dense_model("float64", 0).get_weights()) > 1e-2
    assert relative_error(*weights) <= 1e-9
    # The first batch is compared with that of the whole dataset.
    assert len(set(called)) <= SAMPLES // world.size + BATCH, sorted(called)


class Reshuffled(keras.utils.PyDataset):
    """Shuffles after each epoch, by a generator that is seeded alike on every rank, or not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)
        self.order = np.arange(24)

    def __len__(self) -> int:
        return 3

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        mine = self.order[8 * number : 8 * number + 8]
        return np.eye(24, dtype="float32")[mine], (mine % 3).astype("int64")

    def on_epoch_end(self) -> None:
        self.rng.shuffle(self.order)


@worlds("mpirun-2", extended=True, why="batches that Python makes in another order on one rank")
def check_batches_of_another_order_are_named(world: World) -> None:
    def trained(seed: int) -> str:
        model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(3)])
        trainer = hvdtrain.Trainer(model, "sgd", CROSS_ENTROPY, backend=world.backend)
        try:
            trainer.fit(Reshuffled(seed), epochs=3, shuffle=False, verbose=0)
        except DataError as error:
            return str(error)
        return "trained"

    assert trained(seed=0) == "trained"
    message = trained(seed=world.rank)
    assert "rank 1 was given other batches than rank 0" in message, message
    assert "By step 6" in message, message
    assert "self.rng = np.random.default_rng(seed)" in message, message
