"""Update rules other than the all-reduce: sharded slots (ZeRO stage 1) and local steps, against one process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import (
    BATCH,
    CROSS_ENTROPY,
    EPOCHS,
    MODELS,
    OPTIMIZERS,
    SAMPLES,
    TOLERANCE,
    WIDTH,
    assert_moved,
    batches_of,
    per_sample,
    trained_alone,
    wide_data,
    wide_model,
)
from world import (
    World,
    computing_in,
    exact_arrays,
    flat_bytes,
    moved,
    plain_step,
    plain_training,
    refused,
    relative_error,
)
from worlds import worlds

import hvdtrain
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.update_rules.zero.shards import SMALL_BYTES


def trained(world: World, kind: str, optimizer: Any, dtype: str, **options: Any) -> Any:
    build, data = MODELS[kind]
    # Each rank starts from values of its own: the broadcast must undo that, in the master slices too.
    model = build(dtype, world.rank)
    sharded = [v for v in model.trainable_variables if v.value.dtype.size * int(np.prod(v.shape)) > SMALL_BYTES]
    assert len(sharded) == {"wide": 2, "table": 1}[kind]
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=world.backend, **options)
    trainer.fit(data(dtype), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), "the ranks' weights differ"
    return trainer


def assert_equal(trainer: Any, expected: Sequence[np.ndarray], dtype: str, what: str = "") -> None:
    error = relative_error(trainer.model.get_weights(), expected)
    assert error <= TOLERANCE[dtype], f"{what} {dtype}: {error:.2e}"


@worlds("mpirun-2")
@worlds("gloo-2", "mpirun-4", extended=True)
@exact_arrays()
def check_sharded_slots_train_like_one_process(world: World) -> None:
    for kind, optimizer, dtype in (
        ("wide", "sgd", "float32"),
        ("wide", "adam", "float64"),
        ("table", "adam", "float64"),
    ):
        trainer = trained(world, kind, OPTIMIZERS[optimizer](), dtype, zero=1)
        assert_equal(trainer, world.reference(trained_alone, kind, optimizer, dtype), dtype, kind)


@worlds("mpirun-2", "gloo-2", "mpirun-4", extended=True)
def check_slots_are_a_share_of_the_whole(world: World) -> None:
    trainer = trained(world, "wide", keras.optimizers.Adam(0.01), "float32", zero=1)
    whole = keras.optimizers.Adam(0.01)
    whole.build(wide_model("float32", 0).trainable_variables)
    size = lambda variables: sum(int(np.prod(v.shape)) for v in variables)  # noqa: E731
    small = sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables if int(np.prod(v.shape)) < 16384)
    mine, all_of_them = size(t.value for t in trainer.rule.named_tensors().values()), size(whole.variables)
    assert mine <= (all_of_them - 2 * small) / world.size + 2 * small + 8, (mine, all_of_them, small)


def decaying_and_averaging() -> Any:
    made = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.75)
    return hvdtrain.decaying_weights_only(made)


CLIP_NORM = 0.25


def averaged_alone() -> tuple[list[np.ndarray], np.ndarray, float]:
    """Train the wide model in one process; return the averages of its weights, their outputs and their loss."""
    model, optimizer, (x, y) = wide_model("float64", 0), decaying_and_averaging(), wide_data("float64")
    clip = lambda gradients: tf.clip_by_global_norm(gradients, CLIP_NORM)[0]  # noqa: E731
    plain_training(model, optimizer, per_sample, batches_of(x, y), clip)
    optimizer.finalize_variable_values(model.trainable_variables)  # the averages take the weights' place
    assert_moved(model.get_weights(), wide_model("float64", 0).get_weights())
    outputs = np.array(model(x))
    return model.get_weights(), outputs, float(tf.reduce_mean(per_sample(y, outputs)))


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_sharded_slots_with_everything_else(world: World) -> None:
    """Bounds on the global norm, decay of weights only, averages of weights, microbatches: as in one process."""
    options = {"zero": 1, "clip_norm": CLIP_NORM, "accumulate": 2}
    trainer = trained(world, "wide", decaying_and_averaging(), "float64", **options)
    expected, _, mean = world.reference(averaged_alone)
    assert_equal(trainer, expected, "float64", "clipped, decayed, accumulated")
    weights = trainer.model.get_weights()
    figures = trainer.evaluate(wide_data("float64"), batch=16, return_dict=True)
    assert flat_bytes(trainer.model.get_weights()) == flat_bytes(weights), "the weights are no longer there"
    assert abs(figures["loss"] - mean) <= 1e-6 * mean, (figures["loss"], mean)


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_the_optimizer_is_the_models_again(world: World) -> None:
    """After a training its slots are whole: in a file of Keras, for Keras' own fit, and for the training after."""

    def compiled() -> Any:
        model = wide_model("float64", 0)
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), CROSS_ENTROPY)
        return model

    x, y = wide_data("float64")
    fit = {"epochs": 1, "shuffle": False, "verbose": 0}
    alone = compiled()
    alone.fit(x, y, batch_size=BATCH, **fit)
    saved = [np.array(v) for v in alone.optimizer.variables]
    alone.fit(x, y, batch_size=BATCH, **fit)
    went_on = alone.get_weights()
    alone.fit(x, y, batch_size=BATCH, **fit)
    in_step = {"update": "async", "max_staleness": 0}
    loose = [{"local_steps": 2}, {"update": "async"}, {"update": "gossip"}, {"update": "easgd"}]
    for options in ({}, {"zero": 1}, {"zero": 2}, {"zero": 3}, in_step, *loose):
        model = compiled()
        trainer = hvdtrain.Trainer(model, backend=world.backend, **options)
        trainer.fit(x, y, batch=BATCH, **fit)
        file = world.folder / f"{world.rank}.keras"
        model.save(file)
        loaded = [np.array(v) for v in keras.models.load_model(file).optimizer.variables]
        assert [v.shape for v in loaded] == [v.shape for v in saved], options
        assert world.same_everywhere(flat_bytes(loaded)), f"{options}: ranks save different optimizers"
        if options in loose:
            model.fit(x, y, batch_size=BATCH, **fit)
            continue
        assert relative_error(loaded, saved) <= 1e-9, options
        model.fit(x, y, batch_size=BATCH, **fit)
        assert relative_error(model.get_weights(), went_on) <= 1e-9, options
        trainer.fit(x, y, batch=BATCH, **fit)
        assert relative_error(model.get_weights(), alone.get_weights()) <= 1e-9, options


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_slots_go_on_from_a_checkpoint_sharded_or_not(world: World) -> None:
    """Saved with slices and restored whole, and the other way round: the weights of a run that was never stopped."""

    def trainer_of(seed: int, **options: Any) -> Any:
        rule = keras.optimizers.Adam(0.01)
        return hvdtrain.Trainer(wide_model("float64", seed), rule, CROSS_ENTROPY, backend=world.backend, **options)

    fit = {"batch": BATCH, "shuffle": False, "verbose": False}
    data = wide_data("float64")
    whole = trainer_of(0)
    whole.fit(data, epochs=4, **fit)
    for name, before, after in (
        ("slices", {"zero": 1}, {"zero": 1}),
        ("whole", {"zero": 1}, {}),
        ("cut", {}, {"zero": 1}),
    ):
        first = trainer_of(0, **before)
        first.fit(data, epochs=2, **fit)
        files = Checkpointer(world.folder / f"zero-{name}", backend=world.backend)
        files.save(1, first.state.named_tensors(), asdict(first.state.scalars))
        second = trainer_of(7 + world.rank, **after)
        second.restore(files.find())
        assert second.evaluate(data, return_dict=True)["loss"] == first.evaluate(data, return_dict=True)["loss"], name
        second.fit(data, epochs=2, **fit)
        assert world.same_everywhere(flat_bytes(second.model.get_weights()))
        assert_equal(second, whole.model.get_weights(), "float64", name)
        losses = [trainer.evaluate(data, return_dict=True)["loss"] for trainer in (second, whole)]
        assert abs(losses[0] - losses[1]) <= 1e-6 * losses[1], (name, losses)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_exclusions_by_variable_hold_for_slices(world: World) -> None:
    def train(spare: bool, make: Callable[[Any], Any]) -> Any:
        model = wide_model("float64", 0)
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if spare:
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        return make(model, optimizer)

    def ours(model: Any, optimizer: Any) -> Any:
        trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=world.backend, zero=1)
        trainer.fit(wide_data("float64"), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
        return trainer.model.get_weights()

    def plain(model: Any, optimizer: Any) -> Any:
        return plain_training(model, optimizer, per_sample, batches_of(*wide_data("float64")))

    spared, decayed = train(True, ours), train(False, ours)
    assert relative_error(spared, train(True, plain)) <= 1e-9
    assert moved(spared[:1], decayed[:1]) > 1e-3, "the first kernel decayed all the same"


@worlds("mpirun-2")
@worlds("gloo-2", "mpirun-4", extended=True)
def check_an_overflow_in_one_slice_is_skipped_by_all(world: World) -> None:
    """fp16: the whole gradient overflows in one step on one rank's slice; all ranks skip it and halve the scale."""
    for stage in (1, 2, 3):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(1)])
        optimizer = hvdtrain.LossScaleOptimizer(keras.optimizers.SGD(1e-3, momentum=0.9), initial_scale=2.0**10)
        trainer = hvdtrain.Trainer(model, optimizer, "mse", backend=world.backend, zero=stage)
        x, y = (a.astype("float32") for a in wide_data("float32"))
        x, y = x[:16].copy(), y[:16, None]
        trainer.fit((x, y), batch=16, epochs=1, shuffle=False, verbose=False)
        before = [np.array(w) for w in trainer.model.get_weights()]
        bad = x.copy()
        bad[3, WIDTH - 1] = 1e37  # its gradient overflows in the last row of the first kernel: the last rank's slice
        trainer.fit((bad, y), batch=16, epochs=1, shuffle=False, verbose=False)
        after = [np.array(w) for w in trainer.model.get_weights()]
        assert moved(after, before) == 0.0, f"stage {stage}: a step with an overflow was applied"
        assert world.same_everywhere(np.float64(optimizer.dynamic_scale).tobytes())
        assert float(optimizer.dynamic_scale) == 2.0**9, stage


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_one_local_step_of_sgd_is_a_step_of_data_parallelism(world: World) -> None:
    for kind, dtype in (("wide", "float64"), ("table", "float32")):
        trainer = trained(world, kind, OPTIMIZERS["plain sgd"](), dtype, local_steps=1)
        assert_equal(trainer, world.reference(trained_alone, kind, "plain sgd", dtype), dtype, kind)


Outer = Callable[[np.ndarray, np.ndarray, Any], tuple[np.ndarray, Any]]


def slowmo(before: np.ndarray, mean: np.ndarray, velocity: Any, *, rate: float = 0.1) -> tuple[np.ndarray, Any]:
    """Algorithm 1 of Wang et al. 2019, at a slow learning rate of 0.8 and a momentum of 0.6."""
    velocity = 0.6 * velocity + (before - mean) / rate
    return before - 0.8 * rate * velocity, velocity


def diloco(before: np.ndarray, mean: np.ndarray, velocity: Any) -> tuple[np.ndarray, Any]:
    """Nesterov's momentum as PyTorch has it, at the rates of Douillard et al. 2023."""
    gradient = before - mean
    velocity = 0.9 * velocity + gradient
    return before - 0.7 * (gradient + 0.9 * velocity), velocity


def local_reference(
    world: World,
    optimizer: Any,
    period: int,
    *,
    average_slots: bool = False,
    after: int = 0,
    outer: Outer | None = None,
    samples: int = SAMPLES,
) -> list[np.ndarray]:
    """Emulate all ranks in this process: `period` steps each, then averages by samples; epochs' ends consolidate."""
    model, batches = wide_model("float64", 0), batches_of(*(each[:samples] for each in wide_data("float64")))
    step = plain_step(model, optimizer, per_sample, batches[0])
    slots = optimizer.variables[2:]  # behind iterations and learning rate
    weights = model.trainable_variables
    # What each rank holds; the one model and its optimizer take it up in turn.
    held = [{v.path: np.array(v) for v in (*weights, *slots)} for _ in range(world.size)]
    counts, steps, per_epoch = np.zeros(world.size), 0, -(-samples // BATCH)
    anchors, velocities = dict(held[0]), dict.fromkeys(held[0], 0.0)

    def average(variables: Sequence[Any]) -> None:
        shares = counts / counts.sum() if counts.any() else np.full(world.size, 1 / world.size)
        for path in (v.path for v in variables):
            mean = sum(share * own[path] for share, own in zip(shares, held, strict=True))
            if outer is not None and variables is weights:
                mean, velocities[path] = outer(anchors[path], mean, velocities[path])
            for own in held:
                own[path] = anchors[path] = mean

    for number, (inputs, targets) in enumerate(batches, 1):
        parts = [
            slice(rank * len(inputs) // world.size, (rank + 1) * len(inputs) // world.size)
            for rank in range(world.size)
        ]
        for rank, own in enumerate(held):
            part = slice(None) if number <= after else parts[rank]
            for variable in (*weights, *slots):
                variable.assign(own[variable.path])
            if number <= after or len(inputs[part]):  # else it waits
                step(inputs[part], targets[part])
            own.update({v.path: np.array(v) for v in (*weights, *slots)})
            counts[rank] += parts[rank].stop - parts[rank].start
        steps += 1
        if number <= after:
            anchors.update(held[0])
            counts[:], steps = 0, 0
            continue
        ends_epoch = number % per_epoch == 0
        if steps == period:
            average(weights)
            if average_slots:
                average(slots)
            counts[:], steps = 0, 0
        if ends_epoch:
            if steps:
                average(weights)
            average(slots)
            counts[:], steps = 0, 0
    return [held[0][variable.path] for variable in model.weights]


@worlds("mpirun-2", "mpirun-4", extended=True)
@exact_arrays()
def check_local_steps_follow_their_definition(world: World) -> None:
    """Momentum and three local steps: weights averaged by samples, slots or not; epochs' ends consolidate."""
    momentum = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    plain = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    decaying = lambda: keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)  # noqa: E731
    slow = {"outer_optimizer": "slowmo", "outer_learning_rate": 0.8, "outer_momentum": 0.6}
    for optimizer, options, defined in (
        (momentum, {}, {}),
        (momentum, {"average_slots": True}, {"average_slots": True}),
        (momentum, {"local_after": 5}, {"after": 5}),
        (plain, slow, {"outer": slowmo}),
        (plain, {"outer_optimizer": "diloco"}, {"outer": diloco}),
        (plain, {**slow, "local_after": 5}, {"outer": slowmo, "after": 5}),
        (momentum, {"outer_optimizer": "slowmo", "outer_momentum": 0.0}, {}),  # the average
        (decaying, {}, {"samples": BATCH + 1}),  # a rank without samples in every second step, in which it waits
    ):
        model = wide_model("float64", world.rank)
        trainer = hvdtrain.Trainer(model, optimizer(), CROSS_ENTROPY, backend=world.backend, local_steps=3, **options)
        x, y = (each[: defined.get("samples")] for each in wide_data("float64"))
        trainer.fit((x, y), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, validation_data=(x, y))
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        expected = local_reference(world, optimizer(), 3, **defined)
        error = relative_error(trainer.model.get_weights(), expected)
        assert error <= 1e-9, f"{options}: {error:.2e}"


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_local_steps_that_have_not_begun_are_data_parallelism(world: World) -> None:
    for kind, optimizer in (("wide", "adam"), ("table", "plain sgd")):
        trainer = trained(world, kind, OPTIMIZERS[optimizer](), "float64", local_steps=3, local_after=1000)
        assert_equal(trainer, world.reference(trained_alone, kind, optimizer, "float64"), "float64", kind)


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_an_outer_optimizer_goes_on_from_a_checkpoint(world: World) -> None:
    """With its momentum; from the checkpoint of another rule without, and the other way round."""
    data, slow = wide_data("float64"), {"local_steps": 3, "outer_optimizer": "slowmo"}
    fit = {"batch": BATCH, "shuffle": False, "verbose": False, "validation_data": data}  # epochs end with an average

    def trainer_of(seed: int, **options: Any) -> Any:
        sgd = keras.optimizers.SGD(0.1)
        return hvdtrain.Trainer(wide_model("float64", seed), sgd, CROSS_ENTROPY, backend=world.backend, **options)

    whole = trainer_of(0, **slow)
    whole.fit(data, epochs=4, **fit)
    for name, before, after in (("slowmo", slow, slow), ("to average", slow, {}), ("from average", {}, slow)):
        first = trainer_of(0, **before)
        first.fit(data, epochs=2, **fit)
        files = Checkpointer(world.folder / f"outer-{name}", backend=world.backend)
        files.save(1, first.state.saved_tensors(), asdict(first.state.scalars))
        second = trainer_of(7 + world.rank, **after)
        second.restore(files.find())
        assert second.evaluate(data, return_dict=True)["loss"] == first.evaluate(data, return_dict=True)["loss"], name
        second.fit(data, epochs=2, **fit)
        assert world.same_everywhere(flat_bytes(second.model.get_weights()))
        equal = relative_error(second.model.get_weights(), whole.model.get_weights()) <= 1e-9
        assert equal is (name == "slowmo"), name


@worlds("mpirun-2", extended=True)
def check_local_steps_exchange_nothing_between_averages(world: World) -> None:
    calls: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.backend, name)

        def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
            calls.append(name)
            return world.backend.all_reduce(tensor, name=name, **options)

    trainer = hvdtrain.Trainer(
        wide_model("float32", world.rank), keras.optimizers.SGD(0.1), CROSS_ENTROPY, backend=Noted(), local_steps=4
    )
    history = trainer.fit(wide_data("float32"), batch=BATCH, epochs=2, shuffle=False, verbose=False, log_every=100)
    assert calls, "nothing was averaged"
    assert not [name for name in calls if name.startswith("gradient/") and name != "gradient//norm"], calls
    assert np.isfinite(history.train_loss)
    assert world.same_everywhere(np.float64(history.train_loss).tobytes()), "a rank reported its own loss"


@worlds("mpirun-2", extended=True)
def check_layers_that_are_frozen_later_are_refused(world: World) -> None:
    model = wide_model("float32", 0)
    trainer = hvdtrain.Trainer(model, "adam", CROSS_ENTROPY, backend=world.backend, zero=1)
    trainer.fit(wide_data("float32"), batch=BATCH, verbose=False)
    model.layers[0].trainable = False
    with refused("Layers were frozen or unfrozen since the slots were made", ConfigError):
        trainer.fit(wide_data("float32"), batch=BATCH, verbose=False)
