"""Several kinds of parallelism at once: a model with layers split along tp and experts along ep, on meshes with dp."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks.experts import BATCH, EPOCHS, SAMPLES, whole
from checks.precision import POISON
from checks.tensor_parallel import per_sample
from meshes import alone, on_mesh
from world import World, computing_in, flat_bytes, moved, plain_step, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.optim.precision import precision
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.training.update_rules.zero import shards

CLASSES, WIDTH, LENGTH = 4, 8, 3
BOUND = 1 / 16
RULES = {"up/kernel": (None, "tp"), "down/kernel": ("tp", None), "classes/kernel": (None, "tp")}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
FIT = {"batch": BATCH, "shuffle": False, "verbose": False, "log_every": 1}


def data(dtype: str = "float64") -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(6)
    return rng.standard_normal((SAMPLES, LENGTH, WIDTH)).astype(dtype), rng.integers(0, CLASSES, SAMPLES)


def built(seed: int = 11, balance: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(seed)
    x = inputs = keras.Input((LENGTH, WIDTH))
    y = keras.layers.Dense(2 * WIDTH, activation="relu", name="up")(x)
    x = x + keras.layers.Dense(WIDTH, name="down")(y)
    options = {"top_k": 2, "capacity_factor": None, "balance_weight": balance, "z_weight": 0.01}
    x = x + MixtureOfExperts(4, 8, seed=5, name="experts", **options)(keras.layers.LayerNormalization(name="norm")(x))
    x = keras.layers.Flatten()(x)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="classes")(x))


def split(mesh: World, dtype: str = "float64", **options: Any) -> keras.Model:
    """Return the model as it is split on a mesh; the ranks would draw different values for what is whole."""
    with computing_in(dtype):
        parallelize = Parallelization(mesh.backend.along("tp"), RULES, mesh.backend)
        return parallelize(lambda: built(11 + mesh.session.world.rank, **options), None)


def optimizer_of() -> Any:
    return keras.optimizers.SGD(1 / 8, momentum=0.9, use_ema=True, ema_momentum=0.9)


def layouts(world: World) -> dict[str, int]:
    """Return the stage of ZeRO by layout."""
    return {4: {"ep=2,tp=2": 1, "dp=2,tp=2": 2}, 8: {"dp=2,ep=2,tp=2": 2}}[world.size]


class Reader(keras.callbacks.Callback):
    """Reads the figures and weights of each epoch, as a user's callback may, and puts the weights together."""

    def __init__(self, mesh: World) -> None:
        super().__init__()
        self.mesh = mesh
        self.seen: list[tuple[dict[str, float], list[np.ndarray]]] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append((dict(logs or {}), whole(self.model, self.mesh)))


def trained(mesh: World, zero: int) -> tuple[hvdtrain.Trainer, Reader]:
    options = {"clip_norm": BOUND, "accumulate": 2, "zero": zero, "metrics": ["accuracy"]}
    trainer = hvdtrain.Trainer(split(mesh), optimizer_of(), LOSS, backend=mesh.backend, **options)
    reader = Reader(mesh)
    # What is around the steps is the same on eight ranks: there it would take a minute to compile.
    more = {"validation_data": data()} if mesh.session.world.size == 4 else {}
    trainer.fit(data(), epochs=EPOCHS, callbacks=[reader], **more, **FIT)
    return trainer, reader


class Reference:
    """One process with the whole model, trained on whole batches with the loss that the experts add."""

    def __init__(self) -> None:
        with alone(), computing_in("float64"):
            model = self.model = built()
            x, y = data()
            batches = [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)]
            start = [np.array(w) for w in model.get_weights()]

            def loss(targets: Any, outputs: Any) -> tf.Tensor:
                return per_sample(targets, outputs) + tf.add_n(model.losses)

            def clip(gradients: Any) -> Any:
                return tf.clip_by_global_norm(gradients, BOUND)[0]

            optimizer = optimizer_of()
            step = plain_step(model, optimizer, loss, batches[0], clip)
            self.epochs = []
            for _ in range(EPOCHS):
                for batch in batches:
                    step(*batch)
                self.epochs.append([np.array(w) for w in model.get_weights()])
            assert moved(self.epochs[-1], start) >= 1e-2
            self.loss_of_weights = float(tf.reduce_mean(per_sample(y, model(x))))
            optimizer.finalize_variable_values(model.trainable_variables)
            self.averages = [np.array(w) for w in model.get_weights()]
            self.outputs = np.array(model(x))
            self.loss = float(tf.reduce_mean(per_sample(y, self.outputs)))
            self.accuracy = float(np.mean(self.outputs.argmax(-1) == y))
            for batch in batches:
                step(*batch)
            optimizer.finalize_variable_values(model.trainable_variables)
            self.later = [np.array(w) for w in model.get_weights()]


@worlds("gloo-4", "mpirun-8", extended=True)
@computing_in("float64")
def check_hybrids_train_as_one_process_does(world: World) -> None:
    """Bounds on the norm, microbatches, averages of weights, evaluation, prediction, callbacks, and an uneven tail."""
    expected = Reference()
    for axes, zero in layouts(world).items():
        with on_mesh(world, axes) as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
            trainer, reader = trained(mesh, zero)
            assert any(not tensor.replicated for tensor in trainer.rule.named_tensors().values())
            weights = whole(trainer.model, mesh)
            error = relative_error(weights, expected.averages)
            assert error <= 1e-9, f"{axes}: {error:.2e}"
            everyone = mesh.backend.gather_bytes(flat_bytes(weights), timeout=60)
            assert len(set(everyone)) == 1, f"{axes}: the ranks hold different models"
            assert len(reader.seen) == EPOCHS
            logs, seen = reader.seen[-1]
            assert relative_error(seen, expected.epochs[-1]) <= 1e-9, f"{axes}: what a callback reads"
            if world.size == 4:
                compare_what_is_around(trainer, logs, expected)
                trainer.save(world.folder / axes)
    if world.size == 4:
        go_on_elsewhere(world, world.folder / axes, expected)
        world.gather(b"")
        if world.rank == 0:
            for axes in layouts(world):
                shutil.rmtree(world.folder / axes)


def compare_what_is_around(trainer: hvdtrain.Trainer, logs: dict[str, float], expected: Reference) -> None:
    """Compare prediction, evaluation and the figures that callbacks get with those of one process."""
    outputs = trainer.predict(data()[0], batch=BATCH)
    assert relative_error([outputs], [expected.outputs]) <= 1e-9
    scores = trainer.evaluate(data(), batch=BATCH, verbose=False, return_dict=True)
    assert abs(scores["loss"] - expected.loss) <= 1e-6 * expected.loss, scores
    assert abs(logs["val_loss"] - expected.loss_of_weights) <= 1e-6 * expected.loss_of_weights, logs
    assert abs(scores["accuracy"] - expected.accuracy) <= 1e-6, scores


def go_on_elsewhere(world: World, folder: Path, expected: Reference) -> None:
    """Train another epoch from the last checkpoint, in a layout in which nothing of it is where it was."""
    with on_mesh(world, "dp=2,ep=2") as mesh:
        trainer = hvdtrain.Trainer(split(mesh), optimizer_of(), LOSS, backend=mesh.backend, clip_norm=BOUND)
        trainer.restore(folder)
        found = whole(trainer.model, mesh)
        trainer.fit(data(), epochs=1, **FIT)
        error = relative_error(whole(trainer.model, mesh), expected.later)
        assert error <= 1e-9, f"{error:.2e} after another epoch"
        assert relative_error(found, expected.averages) <= 1e-9


@contextmanager
def without(key: str, part: str) -> Iterator[None]:
    """Leave out the sums along the axes `key` whose names have `part` in them."""
    one, several = AxisCollectives.all_reduce, AxisCollectives.grouped_all_reduce

    def is_left_out(group: Any, name: str) -> bool:
        return bool(group.group.axis == key and part in name)

    def all_reduce(self: Any, tensor: Any, *, name: str, **options: Any) -> Any:
        summed = one(self, tensor, name=name, **options)
        return summed * 0 + tensor if is_left_out(self, name) else summed

    def grouped_all_reduce(self: Any, tensors: Any, *, name: str, **options: Any) -> Any:
        summed = several(self, tensors, name=name, **options)
        if not is_left_out(self, name):
            return summed
        return [total * 0 + tensor for total, tensor in zip(summed, tensors, strict=True)]

    AxisCollectives.all_reduce, AxisCollectives.grouped_all_reduce = all_reduce, grouped_all_reduce
    try:
        yield
    finally:
        AxisCollectives.all_reduce, AxisCollectives.grouped_all_reduce = one, several


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_parameters_of_split_layers_are_slices_among_replicas(world: World) -> None:
    """Stage 3 of ZeRO: a rank keeps half of its half of a kernel, and shows the half to a callback."""
    expected = Reference()
    with on_mesh(world, "dp=2,tp=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        trainer, reader = trained(mesh, 3)
        error = relative_error(whole(trainer.model, mesh), expected.averages)
        assert error <= 1e-9, f"{error:.2e}"
        logs, seen = reader.seen[-1]
        assert relative_error(seen, expected.epochs[-1]) <= 1e-9
        compare_what_is_around(trainer, logs, expected)
        trainer.rule.prepare_to_save()
        kernel = trainer.model.get_layer("up").kernel
        assert kernel._value.numpy().size == 0, "a rank holds all of its slice while it saves"
        trainer.save(world.folder / "slices_of_slices")
    go_on_elsewhere(world, world.folder / "slices_of_slices", expected)
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(world.folder / "slices_of_slices")


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_a_hybrid_with_a_collective_left_out_is_another_model(world: World) -> None:
    expected = Reference().epochs[0]
    for axes, key, part in (("ep=2,tp=2", "ep.tp", "gradient//norm"), ("dp=2,ep=2", "dp", "gradient/")):
        with on_mesh(world, axes) as mesh, without(key, part):
            model = split(mesh)
            options = {"clip_norm": BOUND, "desync_every": 0}
            trainer = hvdtrain.Trainer(model, optimizer_of(), LOSS, backend=mesh.backend, **options)
            trainer.fit(data(), epochs=1, **{**FIT, "log_every": 10})
            error = relative_error(whole(model, mesh), expected)
            assert error > 1e-6, f"{axes} without {key} {part}: {error:.2e}"


@worlds("gloo-4", extended=True)
def check_an_overflow_on_one_rank_is_skipped_by_all(world: World) -> None:
    """In fp16, of a sample that no other replica sees, or whose loss only the last stage computes."""
    x, y = data("float32")
    x, y = x[: 4 * BATCH], y[: 4 * BATCH]
    x[-1] = POISON
    for axes in ("ep=2,tp=2", "pp=2,tp=2"):
        with on_mesh(world, axes) as mesh:
            with precision("mixed_float16"):
                model = Parallelization(mesh.backend.along("tp"), RULES, mesh.backend)(built, None)
            trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.2), LOSS, backend=mesh.backend)
            trainer.fit((x, y), epochs=1, **FIT)
            optimizer = trainer.optimizer
            assert int(optimizer.iterations) == 3, f"{axes}: of 4 steps {int(optimizer.iterations)} were applied"
            assert float(optimizer.dynamic_scale) == 2.0**14, float(optimizer.dynamic_scale)
            weights = whole(trainer.model, mesh)
            assert all(np.isfinite(weight).all() for weight in weights)
            different = set(mesh.backend.gather_bytes(flat_bytes(weights), timeout=60))
            assert len(different) == mesh.backend.axes.get("pp", 1), f"{axes}: ranks hold different models"
