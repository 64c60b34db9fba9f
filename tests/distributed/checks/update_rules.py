"""Update rules other than the all-reduce: sharded slots (ZeRO stage 1) and local steps, against one process."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.parity import BATCH, EPOCHS, batches_of, per_sample
from world import Transform, World, flat_bytes, moved, plain_step, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError
from hvdtrain.training.update_rules.zero.shards import SMALL_BYTES

TOLERANCE = {"float32": 1e-6, "float64": 1e-9}
SAMPLES, WIDTH = 70, 131  # neither 2 nor 4 ranks divide the elements of the kernels


def wide_model(dtype: str, seed: int) -> keras.Model:
    """Two kernels that are sharded, biases that stay whole."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((WIDTH,), dtype=dtype),
            keras.layers.Dense(WIDTH, activation="tanh", dtype=dtype),
            keras.layers.Dense(WIDTH, activation="tanh", dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )
    assert sum(v.value.dtype.size * int(np.prod(v.shape)) > SMALL_BYTES for v in model.trainable_variables) == 2
    return model


def table_model(dtype: str, seed: int) -> keras.Model:
    """A sharded table with sparse gradients, whose rows are looked up several times."""
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            keras.layers.Embedding(1201, 17, dtype=dtype),
            keras.layers.Flatten(dtype=dtype),
            keras.layers.Dense(3, dtype=dtype),
        ]
    )


def wide_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((SAMPLES, WIDTH)).astype(dtype), rng.integers(0, 3, SAMPLES)


def table_data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    return rng.integers(0, 40, (SAMPLES, 5)).astype("int32"), rng.integers(0, 3, SAMPLES)


MODELS = {"wide": (wide_model, wide_data), "table": (table_model, table_data)}


def trained(world: World, kind: str, optimizer: Any, dtype: str, **options: Any) -> Any:
    build, data = MODELS[kind]
    # Each rank starts from values of its own: the broadcast must undo that, in the master slices too.
    model = build(dtype, world.rank)
    trainer = hvdtrain.Trainer(model, optimizer, per_sample, backend=world.backend, **options)
    trainer.fit(data(dtype), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), "the ranks' weights differ"
    return trainer


def reference(kind: str, optimizer: Any, dtype: str, transform: Transform | None = None) -> keras.Model:
    build, data = MODELS[kind]
    model = build(dtype, 0)
    start = [np.array(w) for w in model.get_weights()]
    plain_training(model, optimizer, per_sample, batches_of(*data(dtype)), transform)
    assert moved(model.get_weights(), start) >= 1e-2, "the weights hardly moved: the comparison says nothing"
    return model


def assert_equal(trainer: Any, expected: keras.Model, dtype: str, what: str = "") -> None:
    error = relative_error(trainer.model.get_weights(), expected.get_weights())
    assert error <= TOLERANCE[dtype], f"{what} {dtype}: {error:.2e}"


@worlds("mpirun-2", "gloo-2")
@worlds("mpirun-4", extended=True)
def check_sharded_slots_train_like_one_process(world: World) -> None:
    sgd = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
    adam = lambda: keras.optimizers.Adam(0.01)  # noqa: E731
    for kind, make, dtype in (("wide", sgd, "float32"), ("wide", adam, "float64"), ("table", adam, "float64")):
        trainer = trained(world, kind, make(), dtype, zero=1)
        assert_equal(trainer, reference(kind, make(), dtype), dtype, kind)


@worlds("mpirun-2", "gloo-2")
@worlds("mpirun-4", extended=True)
def check_slots_are_a_share_of_the_whole(world: World) -> None:
    trainer = trained(world, "wide", keras.optimizers.Adam(0.01), "float32", zero=1)
    whole = keras.optimizers.Adam(0.01)
    whole.build(wide_model("float32", 0).trainable_variables)
    size = lambda optimizer: sum(int(np.prod(v.shape)) for v in optimizer.variables)  # noqa: E731
    small = sum(int(np.prod(v.shape)) for v in trainer.model.trainable_variables if int(np.prod(v.shape)) < 16384)
    mine, all_of_them = size(trainer.optimizer), size(whole)
    assert mine <= (all_of_them - 2 * small) / world.size + 2 * small + 8, (mine, all_of_them, small)


def check_sharded_slots_with_everything_else(world: World) -> None:
    """Bounds on the global norm, decay of weights only, averages of weights, microbatches: as in one process."""

    def optimizer() -> Any:
        made = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.75)
        return hvdtrain.decaying_weights_only(made)

    trainer = trained(world, "wide", optimizer(), "float64", zero=1, clip_norm=0.25, accumulate=2)
    plain = optimizer()
    clip = lambda gradients: tf.clip_by_global_norm(gradients, 0.25)[0]  # noqa: E731
    expected = reference("wide", plain, "float64", clip)
    assert_equal(trainer, expected, "float64", "clipped, decayed, accumulated")
    x, y = wide_data("float64")
    weights = trainer.model.get_weights()
    figures = trainer.evaluate((x, y), batch=16)
    assert flat_bytes(trainer.model.get_weights()) == flat_bytes(weights), "the weights are no longer there"
    plain.finalize_variable_values(expected.trainable_variables)  # the averages take the weights' place
    mean = float(tf.reduce_mean(per_sample(y, expected(x))))
    assert abs(figures.loss - mean) <= 1e-6 * mean, (figures.loss, mean)


def check_slots_go_on_from_a_checkpoint_sharded_or_not(world: World) -> None:
    """Saved with slices and restored whole, and the other way round: the weights of a run that was never stopped."""

    def trainer_of(seed: int, **options: Any) -> Any:
        rule = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.75)
        return hvdtrain.Trainer(wide_model("float64", seed), rule, per_sample, backend=world.backend, **options)

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
        assert second.evaluate(data).loss == first.evaluate(data).loss, name
        second.fit(data, epochs=2, **fit)
        assert world.same_everywhere(flat_bytes(second.model.get_weights()))
        assert_equal(second, whole.model, "float64", name)
        losses = [trainer.evaluate(data).loss for trainer in (second, whole)]
        assert abs(losses[0] - losses[1]) <= 1e-6 * losses[1], (name, losses)


def check_exclusions_by_variable_hold_for_slices(world: World) -> None:
    def train(spare: bool, make: Callable[[Any], Any]) -> Any:
        model = wide_model("float64", 0)
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.5)
        if spare:
            optimizer.exclude_from_weight_decay(var_list=[model.layers[0].kernel])
        return make(model, optimizer)

    def ours(model: Any, optimizer: Any) -> Any:
        trainer = hvdtrain.Trainer(model, optimizer, per_sample, backend=world.backend, zero=1)
        trainer.fit(wide_data("float64"), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
        return trainer.model.get_weights()

    def plain(model: Any, optimizer: Any) -> Any:
        return plain_training(model, optimizer, per_sample, batches_of(*wide_data("float64")))

    spared, decayed = train(True, ours), train(False, ours)
    assert relative_error(spared, train(True, plain)) <= 1e-9
    assert moved(spared[:1], decayed[:1]) > 1e-3, "the first kernel decayed all the same"


@worlds("mpirun-2", "gloo-2")
@worlds("mpirun-4", extended=True)
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


@worlds("mpirun-2")
@worlds("mpirun-4", extended=True)
def check_one_local_step_of_sgd_is_a_step_of_data_parallelism(world: World) -> None:
    for kind, dtype in (("wide", "float64"), ("table", "float32")):
        trainer = trained(world, kind, keras.optimizers.SGD(0.1), dtype, local_steps=1)
        assert_equal(trainer, reference(kind, keras.optimizers.SGD(0.1), dtype), dtype, kind)


def local_reference(world: World, optimizer: Any, period: int, average_slots: bool) -> list[np.ndarray]:
    """Emulate all ranks in this process: `period` steps each, then averages by samples; epochs' ends consolidate."""
    model, batches = wide_model("float64", 0), batches_of(*wide_data("float64"))
    step = plain_step(model, optimizer, per_sample, batches[0])
    slots = optimizer.variables[2:]  # behind iterations and learning rate
    weights = model.trainable_variables
    # What each rank holds; the one model and its optimizer take it up in turn.
    held = [{v.path: np.array(v) for v in (*weights, *slots)} for _ in range(world.size)]
    counts, steps, per_epoch = np.zeros(world.size), 0, -(-SAMPLES // BATCH)

    def average(variables: Sequence[Any]) -> None:
        shares = counts / counts.sum() if counts.any() else np.full(world.size, 1 / world.size)
        for path in (v.path for v in variables):
            mean = sum(share * own[path] for share, own in zip(shares, held, strict=True))
            for own in held:
                own[path] = mean

    for number, (inputs, targets) in enumerate(batches, 1):
        for rank, own in enumerate(held):
            part = slice(rank * len(inputs) // world.size, (rank + 1) * len(inputs) // world.size)
            for variable in (*weights, *slots):
                variable.assign(own[variable.path])
            step(inputs[part], targets[part])
            own.update({v.path: np.array(v) for v in (*weights, *slots)})
            counts[rank] += part.stop - part.start
        steps += 1
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


@worlds("mpirun-2")
@worlds("mpirun-4", extended=True)
def check_local_steps_follow_their_definition(world: World) -> None:
    """Momentum and three local steps: weights averaged by samples, slots or not; epochs' ends consolidate."""
    for average_slots in (False, True):
        momentum = lambda: keras.optimizers.SGD(0.1, momentum=0.9)  # noqa: E731
        model = wide_model("float64", world.rank)
        trainer = hvdtrain.Trainer(
            model, momentum(), per_sample, backend=world.backend, local_steps=3, average_slots=average_slots
        )
        x, y = wide_data("float64")
        trainer.fit((x, y), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, validation_data=(x, y))
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
        expected = local_reference(world, momentum(), 3, average_slots)
        error = relative_error(trainer.model.get_weights(), expected)
        assert error <= 1e-9, f"average_slots={average_slots}: {error:.2e}"


def check_local_steps_exchange_nothing_between_averages(world: World) -> None:
    calls: list[str] = []

    class Noted:
        def __getattr__(self, name: str) -> Any:
            return getattr(world.backend, name)

        def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
            calls.append(name)
            return world.backend.all_reduce(tensor, name=name, **options)

    trainer = hvdtrain.Trainer(
        wide_model("float32", world.rank), keras.optimizers.SGD(0.1), per_sample, backend=Noted(), local_steps=4
    )
    history = trainer.fit(wide_data("float32"), batch=BATCH, epochs=2, shuffle=False, verbose=False, log_every=100)
    assert calls, "nothing was averaged"
    assert not [name for name in calls if name.startswith("gradient/") and name != "gradient//norm"], calls
    assert np.isfinite(history.train_loss)
    assert world.same_everywhere(np.float64(history.train_loss).tobytes()), "a rank reported its own loss"


def check_what_does_not_fit_is_refused(world: World) -> None:
    for options, words in (
        ({"zero": 1, "compression": "bf16"}, "compression does not go with zero"),
        ({"zero": 1, "local_steps": 2}, "leave out zero or local_steps"),
        ({"average_slots": True}, "average_slots has no effect"),
    ):
        try:
            hvdtrain.Trainer(wide_model("float32", 0), "sgd", per_sample, backend=world.backend, **options)
        except ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{options} were taken")
    for optimizer, words in (
        (keras.optimizers.Lamb(), "Lamb may look at whole ones"),
        (keras.optimizers.Adam(clipnorm=1.0), "use clip_norm"),
    ):
        try:
            hvdtrain.Trainer(wide_model("float32", 0), optimizer, per_sample, backend=world.backend, zero=1)
        except ConfigError as error:
            assert words in str(error), error
        else:
            raise AssertionError(f"{optimizer.name} was taken")
    model = wide_model("float32", 0)
    trainer = hvdtrain.Trainer(model, "adam", per_sample, backend=world.backend, zero=1)
    trainer.fit(wide_data("float32"), batch=BATCH, verbose=False)
    model.layers[0].trainable = False
    try:
        trainer.fit(wide_data("float32"), batch=BATCH, verbose=False)
    except ConfigError as error:
        assert "Layers were frozen or unfrozen since the slots were made" in str(error), error
    else:
        raise AssertionError("layers were frozen under --zero")
