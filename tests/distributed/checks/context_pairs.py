"""Sequences that are split along cp in models whose layers are stages of a pipeline, or whose experts are divided."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks.context_parallel import BATCH, FIT, LENGTH, LOSS, WORDS, batches_of, copied, sgd, tokens, values
from checks.experts import whole
from checks.hybrids import without
from checks.pipelines import error_of
from meshes import alone, on_mesh
from world import World, computing_in, flat_bytes, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.data.batch import slice_bounds
from hvdtrain.layers.experts import MixtureOfExperts, routing_metrics
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.training.update_rules.zero import shards

SAMPLES = 33  # the last batch has one sample: with divided experts some ranks have none
BOUND = 0.05
EXPERTS = {"top_k": 2, "capacity_factor": None, "balance_weight": 0.05, "z_weight": 0.01}
layers = keras.layers


def stacked(experts: dict[str, Any] | None = None) -> keras.Model:
    """Two blocks in float64, with experts in the second or none, and an output layer that is the table again."""
    keras.utils.set_random_seed(11)
    make: dict[str, Any] = {"dtype": "float64"}
    numbers = keras.Input((LENGTH,), dtype="int32")
    places = keras.ops.cumsum(keras.ops.ones_like(numbers), axis=1) - 1
    table = layers.ReversibleEmbedding(WORDS, 16, name="table", **make)
    x = table(numbers) + layers.Embedding(LENGTH, 16, name="places", **make)(places)
    for block in range(2):
        y = layers.LayerNormalization(name=f"norm{block}", **make)(x)
        y = layers.MultiHeadAttention(4, 4, name=f"attention{block}", **make)(y, y, use_causal_mask=True)
        x = layers.Add(name=f"add{block}", **make)([x, y])
        if experts is not None and block:
            y = MixtureOfExperts(4, 8, seed=5, name="experts", **experts, **make)(x)
        else:
            y = layers.Dense(16, activation="tanh", name=f"dense{block}", **make)(x)
        x = layers.Add(name=f"end{block}", **make)([x, y])
    x = layers.LayerNormalization(name="norm", **make)(x)
    return keras.Model(numbers, table(x, reverse=True))


def data() -> tuple[np.ndarray, np.ndarray]:
    x, y = tokens()
    return x[:SAMPLES], y[:SAMPLES]


def clip(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, BOUND)[0]


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_stages_of_slices_train_as_one_process_does(world: World) -> None:
    """Tied weights, bounds on the norm, microbatches, divided slots, and a short last batch; and what is around."""
    folder = world.folder / "stages_of_slices"
    options = {"clip_norm": BOUND, "accumulate": 2, "zero": 1, "metrics": ["accuracy"]}
    reference = stacked()
    expected = trained_alone(reference, values)
    with on_mesh(world, "cp=2,pp=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        build = lambda: hvdtrain.parallelize(stacked)  # noqa: E731
        trainer = hvdtrain.Trainer(build, sgd(), LOSS, backend=mesh.backend, **options)
        trainer.fit(data(), **FIT | {"log_every": 1})  # which saves a graph
        error = error_of(mesh, trainer, expected, reference)
        assert error <= 1e-9, f"{error:.2e}"
        compare_figures(trainer, reference)
        trainer.save(folder)
    compare_restored(world, folder, stacked, reference)


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_experts_of_slices_train_as_one_process_does(world: World) -> None:
    """Where no token is dropped, with the losses of the router over the tokens of all ranks."""
    folder = world.folder / "experts_of_slices"
    build = lambda: stacked(EXPERTS)  # noqa: E731
    with alone():
        reference = build()

        def loss(targets: Any, outputs: Any) -> tf.Tensor:
            return values(targets, outputs) + tf.add_n(reference.losses)

        expected = trained_alone(reference, loss)
    with on_mesh(world, "cp=2,ep=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        model = hvdtrain.parallelize(build)
        options = {"clip_norm": BOUND, "zero": 3, "metrics": ["accuracy"]}
        trainer = hvdtrain.Trainer(model, sgd(), LOSS, backend=mesh.backend, **options)
        trainer.fit(data(), **FIT)
        weights = whole(model, mesh)
        error = relative_error(weights, expected)
        assert error <= 1e-9, f"{error:.2e}"
        assert mesh.same_everywhere(flat_bytes(weights)), "the ranks hold different models"
        compare_figures(trainer, reference)
        trainer.save(folder)
    compare_restored(world, folder, build, reference)


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_capacity_is_that_of_a_slice(world: World) -> None:
    """The reference gives each slice of each rank's samples its own capacity, and counts each token once."""
    options = {"top_k": 1, "capacity_factor": 0.5, "balance_weight": 0.0, "z_weight": 0.0}
    x, y = (array[: 2 * BATCH] for array in data())
    with alone():
        reference = stacked(options)
        layer = reference.get_layer("experts")
        of_rank = layer.call

        def by_slices(inputs: Any, training: bool | None = None) -> Any:
            samples = [slice(*slice_bounds(BATCH, rank, 2)[:2]) for rank in range(2)]
            positions = [slice(0, LENGTH // 2), slice(LENGTH // 2, LENGTH)]
            rows = [[of_rank(inputs[of, at], training=training) for at in positions] for of in samples]
            return tf.concat([tf.concat(row, 1) for row in rows], 0)

        layer.call = by_slices
        expected = plain_training(reference, sgd(), values, [(x[:BATCH], y[:BATCH]), (x[BATCH:], y[BATCH:])] * 5)
        layer.counts.dropped.assign(0.0)
        reference(x[:BATCH], training=True)
        dropped = float(layer.counts.dropped)
    with on_mesh(world, "cp=2,ep=2") as mesh:
        model = hvdtrain.parallelize(lambda: stacked(options))
        trainer = hvdtrain.Trainer(model, sgd(), LOSS, backend=mesh.backend)
        trainer.fit((x, y), **FIT | {"epochs": 5, "log_every": 1})
        error = relative_error(whole(model, mesh), expected)
        assert error <= 1e-9, f"{error:.2e}"
        begin, end, _ = slice_bounds(BATCH, mesh.backend.along("ep").index, 2)
        figures = counted(model, x[begin:end], mesh)
        assert dropped > BATCH
        assert figures["dropped_tokens"] == dropped
        assert abs(figures["dropped_share"] - dropped / (BATCH * LENGTH)) <= 1e-6


def counted(model: Any, x: np.ndarray, mesh: World) -> dict[str, float]:
    """Return the figures of one call of `model` in training, on each rank's samples."""
    figures = tf.function(lambda: routing_metrics([model.get_layer("experts")], mesh.backend), autograph=False)
    figures()  # what the steps since the last report have counted
    tf.function(lambda: model(x, training=True), autograph=False)()
    return {name: float(value) for name, value in figures().items() if value.shape.rank == 0}


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_a_message_that_is_missing_is_noticed(world: World) -> None:
    x, y = (array[: 2 * BATCH] for array in data())
    expected = plain_training(stacked(), sgd(), values, [(x[:BATCH], y[:BATCH]), (x[BATCH:], y[BATCH:])])
    for lost in (without("cp", "gradient/"), deaf_to("/output/back")):
        with on_mesh(world, "cp=2,pp=2") as mesh, lost:
            model = hvdtrain.parallelize(stacked)
            trainer = hvdtrain.Trainer(model, sgd(), LOSS, backend=mesh.backend, desync_every=0)
            trainer.fit((x, y), **FIT | {"epochs": 1, "log_every": 1})
            error = error_of(mesh, trainer, expected, stacked())
            assert error > 1e-6, f"{error:.2e}"


@contextmanager
def deaf_to(part: str) -> Iterator[None]:
    """Let a rank's own part come back from those exchanges along cp whose names have `part` in them."""
    exchange = AxisCollectives.all_to_all

    def all_to_all(self: Any, tensor: Any, *, name: str) -> Any:
        came = exchange(self, tensor, name=name)
        return came * 0 + tensor if self.group.axis == "cp" and part in name else came

    with mock.patch.object(AxisCollectives, "all_to_all", all_to_all):
        yield


def trained_alone(reference: Any, loss: Any) -> list[np.ndarray]:
    start = copied(reference)
    expected = plain_training(reference, sgd(), loss, batches_of(*data()), clip)
    assert moved(expected, start) >= 1e-2, "the weights hardly moved"
    return expected


def compare_figures(trainer: Any, reference: Any) -> None:
    x, y = data()
    with alone():
        outputs = reference(x).numpy()
    assert np.abs(trainer.predict(x) - outputs).max() <= 1e-9 * np.abs(outputs).max(), "predict"
    scores = trainer.evaluate((x, y), batch=BATCH, verbose=False, return_dict=True)
    assert abs(scores["loss"] - float(tf.reduce_mean(values(y, outputs)))) <= 1e-9
    assert abs(scores["accuracy"] - np.mean(outputs.argmax(-1) == y)) <= 1e-6


def compare_restored(world: World, folder: Path, build: Any, reference: Any) -> None:
    """Restore the checkpoint where every rank holds the whole model."""
    x, _ = data()
    with on_mesh(world, "dp=-1") as plain:
        again = hvdtrain.Trainer(build(), sgd(), LOSS, backend=plain.backend, clip_norm=BOUND)
        again.restore(folder)
        with alone():
            expected = reference(x).numpy()
        assert np.abs(again.predict(x) - expected).max() <= 1e-8, "restored without cp"
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)
