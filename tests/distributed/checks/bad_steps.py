"""Bad steps on several ranks: NaN, infinity or a spike on one of them, and all skip the step or roll back together."""

import contextlib
import io
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, EPOCHS, trained_alone, wide_data, wide_model
from checks.calls import refusal
from checks.training import CROSSENTROPY, classifier, samples
from world import World, exact_arrays, flat_bytes, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError

BATCH = 16
FIT = {"batch": BATCH, "shuffle": False, "verbose": 0, "log_every": 1}
"""All steps are logged: what is compiled is compiled once."""
BAD_STEP = 2
"""Counted from 1."""


def with_bad(world: World, x: np.ndarray, value: float) -> np.ndarray:
    """The samples, one of which is bad: of the second batch one that only the last rank reads."""
    bad = x.copy()
    bad[(BAD_STEP - 1) * BATCH + BATCH - 1, 0] = value
    return bad


def without(x: np.ndarray) -> np.ndarray:
    """The samples without those of the bad batch."""
    return np.concatenate([x[: (BAD_STEP - 1) * BATCH], x[BAD_STEP * BATCH :]])


def state_of(trainer: Any) -> bytes:
    """All tensors of the state that all ranks hold alike."""
    tensors = trainer.state.compared_tensors().values()
    return flat_bytes([tensor.value.numpy() for tensor in tensors if tensor.replicated])


def assert_same(world: World, mine: Any, other: Any, what: Any) -> None:
    for path, tensor in mine.state.named_tensors().items():  # slices too
        expected = other.state.named_tensors()[path].value.numpy()
        np.testing.assert_array_equal(tensor.value.numpy(), expected, err_msg=f"{what}: {path}")
    assert world.same_everywhere(state_of(mine)), f"{what}: the ranks differ"


def said_by(world: World, trainer: Any, *data: Any, **options: Any) -> tuple[Any, str]:
    """Train, and return the result, and what was printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = trainer.fit(*data, **{**FIT, "verbose": 2, **options})
    return result, world.gather(printed.getvalue().encode())[0].decode()


@worlds("mpirun-2", extended=True)
def check_a_bad_sample_on_one_rank_is_skipped_by_all(world: World) -> None:
    """Every way of exchanging and updating comes, to the last bit, to what it does without the batch."""
    x, y = (each[: 4 * BATCH] for each in wide_data("float32"))
    ways: list[dict[str, Any]] = [
        {"zero": 1, "clip_norm": 0.5},
        {"compression": "bf16", "gradient_groups": 1, "accumulate": 2},
        {"reduce_op": "adasum"},
    ]
    for way in ways:
        if way.get("reduce_op") == "adasum" and (world.size < 2 or world.controller != "mpi"):
            continue
        trainers = []
        for data, more in (((with_bad(world, x, np.inf), y), {"on_bad_step": "skip"}), ((without(x), without(y)), {})):
            optimizer = keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9)
            model = wide_model("float32", world.rank)
            trainer = hvdtrain.Trainer(
                model, optimizer, CROSS_ENTROPY, ["accuracy"], backend=world.backend, **way, **more
            )
            result = trainer.fit(data, epochs=1, **FIT)
            trainers.append(trainer)
            assert more == {} or result.bad_steps["non_finite"] == 1, (way, result.bad_steps)
        assert_same(world, *trainers, way)


@worlds("mpirun-2")
@worlds("gloo-4", extended=True)
@exact_arrays()
def check_skipping_is_what_one_process_does_without_the_batch(world: World) -> None:
    """Against a plain loop in this process, in float64 and with a short last batch."""
    x, y = wide_data("float64")
    model = wide_model("float64", world.rank)
    optimizer = keras.optimizers.Adam(0.01)
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=world.backend, on_bad_step="skip")
    doubled = np.concatenate([x[: (BAD_STEP - 1) * BATCH], x[:BATCH], x[(BAD_STEP - 1) * BATCH :]])
    labels = np.concatenate([y[: (BAD_STEP - 1) * BATCH], y[:BATCH], y[(BAD_STEP - 1) * BATCH :]])
    result = trainer.fit((with_bad(world, doubled, np.nan), labels), epochs=EPOCHS, **FIT)
    expected = world.reference(trained_alone, "wide", "adam", "float64")
    assert relative_error(trainer.model.get_weights(), expected) <= 1e-9
    assert result.bad_steps["non_finite"] == EPOCHS
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))


@worlds("mpirun-2", extended=True)
def check_statistics_of_normalization_are_those_of_good_steps(world: World) -> None:
    x, y = samples(3 * BATCH)
    for synchronized in (False, True):
        trainers = []
        for data, more in (((with_bad(world, x, np.nan), y), {"on_bad_step": "skip"}), ((without(x), without(y)), {})):
            model = classifier(0, keras.layers.BatchNormalization(momentum=0.5))
            options = {"sync_batch_norm": synchronized, **more}
            trainers.append(hvdtrain.Trainer(model, "adam", CROSSENTROPY, backend=world.backend, **options))
            trainers[-1].fit(data, epochs=1, **FIT)
        assert_same(world, *trainers, f"synchronized: {synchronized}")


def check_the_rank_and_the_variable_of_a_bad_gradient_are_named(world: World) -> None:
    @tf.custom_gradient
    def exploding(x: tf.Tensor) -> Any:
        return x, lambda upstream: tf.where(tf.reduce_max(x) > 50.0, upstream * np.inf, upstream)

    class Exploding(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return exploding(inputs)

    x, y = samples(3 * BATCH)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3), Exploding()])
    own = {"on_bad_step": "skip", "whole_batch": False}
    trainer = hvdtrain.Trainer(model, "sgd", CROSSENTROPY, backend=world.backend, **own)
    # Only the last rank has a batch in which an output is that large: its loss is finite, its gradient is not.
    last = world.size - 1
    first_kernel = np.zeros((5, 8), "float32")
    first_kernel[0] = 1.0
    model.set_weights([first_kernel, np.zeros(8, "float32"), np.full((8, 3), 10.0, "float32"), np.zeros(3, "float32")])
    x[:, 0] = -5.0
    x[(BAD_STEP - 1) * BATCH + BATCH - 1, 0] = 5.0
    result, said = said_by(world, trainer, (x, y), epochs=1)
    assert result.bad_steps["non_finite"] == 1
    expected = "step 2 (epoch 1) is skipped: NaN or infinity in the gradient of layers/0/kernel and 3 more"
    assert expected + (f" of rank {last}." if world.size > 1 else ".") in said, said
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))


@worlds("mpirun-2", extended=True)
def check_a_spike_is_one_on_all_ranks(world: World) -> None:
    x, y = (np.concatenate([each] * 8)[: 24 * BATCH] for each in samples(50))
    x[20 * BATCH + BATCH - 1] *= 1e4
    keras.utils.set_random_seed(0)  # the label below must be the same on all ranks
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(
        model, "sgd", CROSSENTROPY, backend=world.backend, on_bad_step="skip", spike_threshold=20.0
    )
    y[20 * BATCH + BATCH - 1] = int(np.argmin(x[20 * BATCH + BATCH - 1] @ model.layers[0].kernel.numpy()))
    result, said = said_by(world, trainer, (x, y), epochs=1)
    assert result.bad_steps == {"non_finite": 0, "spikes": 1, "rollbacks": []}, said
    assert "step 21 (epoch 1) is skipped: a loss of " in said, said
    assert world.size == 1 or f", highest on rank {world.size - 1} (" in said, said
    assert world.same_everywhere(state_of(trainer))


def check_all_ranks_roll_back_to_the_same_checkpoint(world: World) -> None:
    """With slots in slices: the state of the checkpoint, and then the batches that come next."""
    x, y = (each[: 4 * BATCH] for each in wide_data("float32"))
    folder = world.folder / "rollback"
    options: dict[str, Any] = {"backend": world.backend, "zero": 1}
    build = [wide_model("float32", world.rank) for _ in range(2)]
    rolled = hvdtrain.Trainer(build[0], "adam", CROSS_ENTROPY, on_bad_step="rollback", **options)
    saves = hvdtrain.Checkpoint(folder, every=1)
    data = with_bad(world, x, np.nan), y
    result, said = said_by(world, rolled, data, epochs=1, checkpoint=saves)
    assert result.bad_steps["rollbacks"] == [[2, 2]], said
    assert "rolled back after step 2 to the checkpoint of step 1" in said, said
    never = hvdtrain.Trainer(build[1], "adam", CROSS_ENTROPY, **options)
    never.fit((without(x), without(y)), epochs=1, **FIT)
    assert_same(world, rolled, never, "rolled back")


@worlds("mpirun-2", extended=True)
def check_ranks_that_disagree_on_bad_steps_are_refused(world: World) -> None:
    mine = "skip" if world.rank else "raise"
    trainer = hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, backend=world.backend, on_bad_step=mine)
    said = refusal(world, lambda: trainer.fit(samples(), epochs=1, **FIT), ConfigError)
    assert "on_bad_step" in said, said
