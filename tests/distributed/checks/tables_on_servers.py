"""Hybrid training, with tables on servers and an all-reduce for the rest, against one process."""

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import BATCH, CROSS_ENTROPY, EPOCHS, MODELS, SAMPLES, batches_of, optimizers_of_keras, per_sample
from world import World, computing_in, exact_arrays, flat_bytes, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.observability.events import Observer, StepRecord
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan

FIT = {"batch": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": False}
STEPS = -(-SAMPLES // BATCH)
TABLE = "embedding"


def two_tables(seed: int) -> keras.Model:
    """Two tables of different widths, of which one is shared by two columns, and dense layers."""
    keras.utils.set_random_seed(seed)
    columns = keras.Input((5,), dtype="int32")
    users, items = (
        keras.layers.Embedding(1201, width, dtype="float64", name=f"{TABLE}_{name}")
        for name, width in (("users", 17), ("items", 8))
    )
    parts = [users(columns[:, :2]), items(columns[:, 2:])]
    flat = keras.layers.Concatenate(dtype="float64")([keras.layers.Flatten(dtype="float64")(part) for part in parts])
    hidden = keras.layers.Dense(8, "tanh", dtype="float64")(flat)
    return keras.Model(columns, keras.layers.Dense(3, dtype="float64")(hidden))


def data() -> Any:
    return MODELS["table"][1]("float64")


class Noted(Observer):
    def __init__(self) -> None:
        self.norms: list[float | None] = []

    def on_step(self, record: StepRecord) -> None:
        self.norms.append(record.grad_norm)


def sgd() -> Any:
    return keras.optimizers.SGD(0.1)


def adagrad() -> Any:
    return keras.optimizers.Adagrad(keras.optimizers.schedules.PiecewiseConstantDecay([STEPS], [0.1, 0.05]))


def momentum() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01)


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_tables_on_servers_train_as_an_all_reduce(world: World) -> None:
    """By choice and by name, also with optimizers that change every row, and dense variables on servers."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        (sgd, {}),
        (adagrad, {"compression": "none", "gradient_groups": 2}),
        (momentum, {"server_variables": (TABLE,)}),
        (keras.optimizers.Adam, {"server_variables": ("users", "dense.*/kernel"), "accumulate": 2}),
    ]
    for make, options in cases:
        trainer = hvdtrain.Trainer(
            two_tables(world.rank), make(), CROSS_ENTROPY, backend=world.backend, update="hybrid", **options
        )
        result = trainer.fit(data(), **FIT, validation_data=data(), log_every=1)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        assert set(result.staleness) == {0}, result.staleness
        plain = hvdtrain.Trainer(two_tables(0), make(), CROSS_ENTROPY, backend=world.backend, accumulate=1)
        other = plain.fit(data(), **FIT, validation_data=data(), log_every=1)
        expected = plain_training(two_tables(0), make(), per_sample, batches_of(*data()))
        error = relative_error(trainer.model.get_weights(), expected)
        assert error <= 1e-9, f"{options}: {error:.2e}"
        assert int(trainer.optimizer.iterations) == EPOCHS * STEPS
        assert abs(result.history["loss"][-1] - other.history["loss"][-1]) <= 1e-6, options
        assert abs(result.evaluations[-1].loss - other.evaluations[-1].loss) <= 1e-6, options


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_the_norm_is_that_of_rows_and_dense_gradients(world: World) -> None:
    norms = []
    for options in ({"update": "hybrid"}, {}):
        trainer = hvdtrain.Trainer(two_tables(0), sgd(), CROSS_ENTROPY, backend=world.backend, **options)
        x, y = data()
        batches = training_data((x, y), world.backend, batch=BATCH, seed=0, shuffle=False, steps_per_epoch=None)
        noted = Noted()
        trainer.build(batches)
        trainer.train(batches, Plan(STEPS, log_every=1), observers=noted)
        norms.append(noted.norms)
    assert len(norms[0]) == STEPS
    np.testing.assert_allclose(*norms, rtol=1e-9)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_rows_that_are_pulled_ahead_are_a_step_older(world: World) -> None:
    """Dense weights are those of the step before, tables those of one step earlier."""
    model = two_tables(0)
    trainer = hvdtrain.Trainer(
        two_tables(world.rank), sgd(), CROSS_ENTROPY, backend=world.backend, update="hybrid", pull_ahead=True
    )
    trainer.fit(data(), **FIT)
    variables = model.trainable_variables
    present, older = ([np.array(v) for v in variables] for _ in range(2))
    is_table = [TABLE in v.path for v in variables]
    assert sum(is_table) == 2
    for inputs, targets in batches_of(*data()):
        for variable, now, before, table in zip(variables, present, older, is_table, strict=True):
            variable.assign(before if table else now)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(per_sample(targets, model(inputs, training=True)))
        found = tape.gradient(loss, [v.value for v in variables])
        older = present
        present = [w - 0.1 * tf.convert_to_tensor(g).numpy() for w, g in zip(present, found, strict=True)]
    error = relative_error(trainer.model.get_weights(), present)
    assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_hybrid_training_goes_on_from_checkpoints(world: World) -> None:
    """Of its own, and from and to an all-reduce's, as a run that was never stopped."""
    fit = {"batch": BATCH, "shuffle": False, "verbose": False}
    whole = plain_training(two_tables(0), adagrad(), per_sample, batches_of(*data()))

    def trainer_of(seed: int, **options: Any) -> Any:
        return hvdtrain.Trainer(two_tables(seed), adagrad(), CROSS_ENTROPY, backend=world.backend, **options)

    hybrid = {"update": "hybrid"}
    for number, (before, after) in enumerate([(hybrid, hybrid), (hybrid, {}), ({}, hybrid)]):
        folder = world.folder / f"hybrid-{number}"
        trainer_of(0, **before).fit(data(), epochs=EPOCHS // 2, checkpoint=folder, **fit)
        second = trainer_of(7 + world.rank, **after)
        second.resume(folder)
        second.fit(data(), epochs=EPOCHS, checkpoint=folder, **fit)
        assert world.same_everywhere(flat_bytes(second.model.get_weights()))
        error = relative_error(second.model.get_weights(), whole)
        assert error <= 1e-9, f"{before} {after}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
@computing_in("float64")
def check_every_optimizer_on_servers_is_that_of_an_all_reduce(world: World) -> None:
    """With tables named, dense variables on all ranks, and a checkpoint on the way; each slot of a table lies once."""
    fit = {"batch": BATCH, "shuffle": False, "verbose": False}

    def trainer_of(kind: Any, **options: Any) -> Any:
        return hvdtrain.Trainer(two_tables(0), kind(0.02), CROSS_ENTROPY, backend=world.backend, **options)

    kinds = optimizers_of_keras()
    del kinds["Muon"]  # Keras' has no arithmetic in 64 bits; the zoo trains with it in 32
    with refused("does not go with Nadam, which advances u_product in each update", ConfigError):
        trainer_of(kinds.pop("Nadam"), update="hybrid", server_variables=(TABLE,)).fit(data(), **FIT)
    for name, kind in kinds.items():
        expected = trainer_of(kind)
        expected.fit(data(), epochs=2, **fit)
        hybrid = {"update": "hybrid", "server_variables": (TABLE,)}
        trainer_of(kind, **hybrid).fit(data(), epochs=1, checkpoint=world.folder / name, **fit)
        found = trainer_of(kind, **hybrid)
        found.resume(world.folder / name)
        found.fit(data(), epochs=2, **fit)
        error = relative_error(found.model.get_weights(), expected.model.get_weights())
        assert error <= 1e-9, f"{name}: {error:.2e}"
        held = [int(text) for text in world.gather(str(elements(found.optimizer)).encode())]
        whole = elements(expected.optimizer)
        tables = [np.size(v) for v in found.model.trainable_variables if TABLE in v.path]
        slots = (whole // sum(np.size(v) for v in found.model.trainable_variables)) * sum(tables)
        assert sum(held) <= whole * world.size - slots * (world.size - 1) + 64, f"{name}: {held} of {whole}"


def elements(optimizer: Any) -> int:
    return sum(tf.convert_to_tensor(v.value).shape.num_elements() for v in optimizer.variables)


@worlds("mpirun-2", extended=True)
def check_what_belongs_on_no_server_is_refused(world: World) -> None:
    averaging = keras.optimizers.SGD(0.1, use_ema=True)
    cases: list[tuple[str, Any, dict[str, Any], str]] = [
        ("table", keras.optimizers.Adam(), {}, "gains nothing with Adam, which changes rows without a gradient too"),
        ("dense", sgd(), {}, "puts tables on servers of which a step touches few rows, and Sequential has none"),
        ("embedding", sgd(), {}, "of which a step touches few rows, and Sequential has none"),
        (
            "table",
            sgd(),
            {"server_variables": ("tabel",)},
            "server_variables='tabel' matches no variable of",
        ),
        ("table", averaging, {}, "update='hybrid' keeps no averages of weights"),
        ("table", sgd(), {"clip_norm": 1.0}, "update='hybrid' does not go with clip_norm=1.0"),
    ]
    for kind, optimizer, options, said in cases:
        with refused(said, ConfigError):
            given = {"backend": world.backend, "update": "hybrid", **options}
            trainer = hvdtrain.Trainer(MODELS[kind][0]("float32", 0), optimizer, CROSS_ENTROPY, **given)
            trainer.fit(MODELS[kind][1]("float32"), **FIT)
