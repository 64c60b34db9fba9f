"""Data of which each rank is given its own part (`shard="rank"`), of any length."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from as_keras import assert_same
from builders import CROSS_ENTROPY, dense_data, dense_model, per_sample
from world import World, computing_in, exact_arrays, flat_bytes, moved, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import DataError, UserError

ROWS = 8
Arrays = tuple[np.ndarray, ...]


class Batches(keras.utils.PyDataset):
    """Batches of a rank's arrays, in their order."""

    def __init__(self, part: Arrays) -> None:
        super().__init__()
        self.part = part

    def __len__(self) -> int:
        return -(-len(self.part[0]) // ROWS)

    def __getitem__(self, number: int) -> Arrays:
        return tuple(array[number * ROWS : (number + 1) * ROWS] for array in self.part)


def generator(part: Arrays) -> Callable[[], Any]:
    def batches() -> Any:
        yield from (Batches(part)[number] for number in range(len(Batches(part))))

    return batches


def dataset(part: Arrays) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(part)


def ends(world: World, *, empty: bool = False) -> list[int]:
    """Where the parts end: the first rank has most samples, the last few or none."""
    held = [37, 0 if empty else 11, 20, 3][: world.size]
    return [0, *np.cumsum(held).tolist()]


def parts(world: World, dtype: str = "float64", *, empty: bool = False) -> list[Arrays]:
    x, y = dense_data(dtype)
    bounds = ends(world, empty=empty)
    return [(x[begin:end], y[begin:end]) for begin, end in itertools.pairwise(bounds)]


def steps_of(held: Sequence[Arrays], epochs: int) -> list[Arrays]:
    """What the ranks train on together, step by step."""
    count = max(len(Batches(part)) for part in held)
    steps = [[Batches(part)[step] for part in held if step < len(Batches(part))] for step in range(count)]
    return [tuple(np.concatenate(arrays) for arrays in zip(*step, strict=True)) for step in steps] * epochs


def trainer_of(world: World, dtype: str = "float64", **options: Any) -> hvdtrain.Trainer:
    return hvdtrain.Trainer(
        dense_model(dtype, world.rank), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=world.backend, **options
    )


@computing_in("float64")
def check_parts_of_any_length_train_as_one_process_does(world: World) -> None:
    held = parts(world)
    mine = held[world.rank]
    batched = {"shuffle": False, "shard": "rank", "epochs": 2, "verbose": 0}
    forms: dict[str, tuple[Any, dict[str, Any]]] = {
        "arrays": (mine, {"batch_size": ROWS}),
        "samples of a dataset": (dataset(mine), {"batch": ROWS * world.size}),
        "batches of a dataset": (dataset(mine).batch(ROWS), {}),
        "PyDataset": (Batches(mine), {}),
        "generator": (generator(mine), {}),
    }
    expected = plain_training(dense_model("float64", 0), keras.optimizers.SGD(0.1), per_sample, steps_of(held, 2))
    assert moved(expected, dense_model("float64", 0).get_weights()) > 1e-2
    whole = tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))
    for name, (data, options) in forms.items():
        trainer = trainer_of(world)
        trainer.fit(data, **options, **batched)
        weights = trainer.model.get_weights()
        assert relative_error(weights, expected) <= 1e-9, (name, relative_error(weights, expected))
        assert world.same_everywhere(flat_bytes(weights)), name
        if name in ("batches of a dataset", "generator"):  # arrays: check_validation_parts_count_each_sample_once
            found = trainer.evaluate(data, shard="rank", verbose=0, return_dict=True)
            alike = trainer.evaluate(whole, batch=ROWS * world.size, verbose=0, return_dict=True)
            np.testing.assert_allclose(found["loss"], alike["loss"], rtol=1e-9, err_msg=name)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_a_rank_without_samples_takes_part(world: World) -> None:
    """With accumulation, weights of the samples, and in both dtypes."""
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-6)):
        held = parts(world, dtype, empty=True)
        mine = held[world.rank]
        expected = plain_training(dense_model(dtype, 0), keras.optimizers.SGD(0.1), per_sample, steps_of(held, 2))
        for data in (mine, generator(mine)) if dtype == "float64" else (dataset(mine).batch(ROWS),):
            trainer = trainer_of(world, dtype, accumulate=2)
            sizes = {"batch_size": ROWS} if isinstance(data, tuple) else {}
            trainer.fit(data, epochs=2, shuffle=False, shard="rank", verbose=0, **sizes)
            assert relative_error(trainer.model.get_weights(), expected) <= bound, (dtype, type(data))
            assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_predictions_are_those_of_the_own_inputs(world: World) -> None:
    trainer = trainer_of(world)
    for empty in (False, True):
        mine = parts(world, empty=empty)[world.rank][0]
        found = trainer.predict(mine, batch_size=ROWS, shard="rank")
        assert found.shape == (len(mine), 1) or found.shape[0] == len(mine)
        if len(mine):
            np.testing.assert_allclose(found, trainer.model(mine).numpy(), rtol=1e-12)
    same = trainer.predict(dense_data("float64")[0][:10], shard="rank")
    assert len(same) == 10, "inputs that are the same on every rank are each rank's own, too"


@worlds("mpirun-2", extended=True)
def check_validation_parts_count_each_sample_once(world: World) -> None:
    held = parts(world)
    mine = held[world.rank]
    whole = tuple(np.concatenate(arrays) for arrays in zip(*held, strict=True))
    losses = []
    for validation in (mine, whole, dataset(mine).batch(5)):
        trainer = trainer_of(world)
        result = trainer.fit(
            mine, batch_size=ROWS, epochs=1, shuffle=False, shard="rank", verbose=0, validation_data=validation
        )
        losses.append(result.evaluations[-1].loss)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-9)


@worlds("mpirun-2", extended=True)
def check_endless_parts_need_steps(world: World) -> None:
    mine = parts(world)[world.rank]
    endless = dataset(mine).repeat().batch(ROWS)
    trainer = trainer_of(world)
    result = trainer.fit(endless, epochs=2, steps_per_epoch=3, shard="rank", verbose=0)
    assert result.steps == 6
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    refused = _refused(lambda: trainer.fit(endless, shard="rank", verbose=0))
    assert "pass steps_per_epoch" in refused


@worlds("mpirun-2", extended=True)
def check_parts_that_do_not_go_together_are_refused_on_every_rank(world: World) -> None:
    x, y = parts(world)[world.rank]
    other = (x, y.astype("float32") if world.rank == 1 else y)
    nothing = (x[:0], y[:0])
    cases: dict[str, Any] = {"must have one structure": other, "No rank has training samples": nothing}
    for said, data in cases.items():
        refused = _refused(lambda data=data: trainer_of(world).fit(data, batch_size=ROWS, shard="rank", verbose=0))
        assert said in refused, refused
        assert world.same_everywhere(refused.encode())
    refused = _refused(lambda: trainer_of(world).fit((x, y), batch_size=ROWS, shard="ranks", verbose=0))
    assert "Received: 'ranks'" in refused
    refused = _refused(lambda: trainer_of(world).fit((x, y), batch_size=ROWS, verbose=0))
    assert 'pass shard="rank"' in refused, refused


def _refused(call: Callable[[], Any]) -> str:
    try:
        call()
    except UserError as error:
        return str(error)
    raise DataError("it was taken")


class Graphs(keras.Model):
    """One message along each edge, and a mean over the nodes of each graph."""

    def __init__(self) -> None:
        super().__init__()
        keras.utils.set_random_seed(0)
        self.embed, self.read = keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        nodes = self.embed(inputs["nodes"])
        sent = tf.gather(nodes, inputs["edges"][:, 0])
        nodes += tf.math.unsorted_segment_sum(sent, inputs["edges"][:, 1], tf.shape(nodes)[0])
        return self.read(tf.math.segment_mean(nodes, inputs["graph"]))


def batch_of_graphs(count: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray]:
    sizes = rng.integers(2, 5, count)
    total = int(sizes.sum())
    inputs = {
        "nodes": rng.standard_normal((total, 4)),
        "edges": rng.integers(0, total, (2 * total, 2)),
        "graph": np.repeat(np.arange(count), sizes),
    }
    return inputs, rng.standard_normal((count, 1))


def merged(first: Any, second: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return two batches of graphs as one."""
    (one, targets), (other, more) = first, second
    moved_on = {"nodes": 0, "edges": len(one["nodes"]), "graph": len(targets)}
    inputs = {name: np.concatenate([one[name], other[name] + shift]) for name, shift in moved_on.items()}
    return inputs, np.concatenate([targets, more])


@worlds("mpirun-2", extended=True)
def check_graphs_are_trained_in_whole_batches(world: World) -> None:
    """Edges, nodes and graphs of a batch differ in number: each rank takes batches in turn."""
    rng = np.random.default_rng(3)
    batches = [batch_of_graphs(count, rng) for count in (4, 3, 2, 3)]

    def dataset(elements: list[Any]) -> tf.data.Dataset:
        inputs, targets = elements[0]
        signature = (
            {name: tf.TensorSpec((None, *array.shape[1:]), array.dtype) for name, array in inputs.items()},
            tf.TensorSpec((None, 1), targets.dtype),
        )
        return tf.data.Dataset.from_generator(lambda: iter(elements), output_signature=signature)

    with computing_in("float64"):
        reference = Graphs()
        reference.compile(keras.optimizers.SGD(0.1), "mse")
        pairs = [merged(*batches[place : place + 2]) for place in (0, 2)]
        expected = reference.fit(dataset(pairs), epochs=2, shuffle=False, verbose=0)
        model = Graphs()
        trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.1), "mse", backend=world.backend)
        mine = dataset(batches).shard(world.size, world.rank)
        found = trainer.fit(mine, shard="rank", epochs=2, shuffle=False, verbose=0)
        assert_same(model.get_weights(), reference.get_weights(), "weights")
        with refused("give each rank whole batches of its own", DataError):
            hvdtrain.Trainer(Graphs(), "sgd", "mse", backend=world.backend).fit(dataset(pairs), epochs=1, verbose=0)
    assert len(found.history["loss"]) == len(expected.history["loss"])
