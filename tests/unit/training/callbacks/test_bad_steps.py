"""Steps whose loss or gradient is NaN or infinite, or whose loss is a spike: raised, skipped or rolled back."""

import functools
import shutil
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.checkpoint.index import read_index
from hvdtrain.checkpoint.naming import complete
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import BadStepError, CheckpointError, ConfigError, NonFiniteError, on_command_line
from hvdtrain.config.training import BadStepConfig
from hvdtrain.training.plan import Plan
from hvdtrain.training.step.guard import FEWEST, GOOD, HISTORY, NON_FINITE, SPIKE, GuardedTotals, StepGuard
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, dense, samples
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")

BATCH = 16
SAMPLES = 10 * BATCH
RNG = np.random.default_rng(0)
X, Y = samples(SAMPLES)
CROSSENTROPY = cross_entropy()
FIT = {"batch": BATCH, "shuffle": False, "verbose": 0}
METRICS = ("accuracy", "sparse_categorical_crossentropy")


def normalized(dtype=None):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3, dtype="float32")]
    return keras.Sequential([keras.Input((5,)), *layers])


def with_bad(*samples, value=np.nan):
    x = X.copy()
    x[list(samples), 2] = value
    return x


def without(*steps):
    """The data without the batches of these steps, counted from 1."""
    kept = [i for i in range(SAMPLES) if i // BATCH + 1 not in steps]
    return X[kept], Y[kept]


def trainer_of(model=normalized, optimizer="adam", metrics=METRICS, **options):
    return Trainer(model(), optimizer, CROSSENTROPY, list(metrics), **options)


def assert_same_state(mine, other):
    """All weights, slots and statistics are equal, to the last bit."""
    theirs = other.state.named_tensors()
    for path, tensor in mine.state.named_tensors().items():
        np.testing.assert_array_equal(tensor.value.numpy(), theirs[path].value.numpy(), err_msg=path)


# -- skip --


@pytest.mark.parametrize(
    "options",
    mostly_extended(
        [{}, {"accumulate": 4}, {"jit": True}, {"clip_norm": 0.5}, {"clip_value": 0.01}],
        lambda options: "accumulate" in options,
        why="it sees the gradients before they are looked at",
    ),
)
def test_skipping_is_training_without_the_batch(options, capsys):
    """Weights, slots, the average of the weights, BatchNorm's statistics and the metrics, over two epochs."""
    optimizer = functools.partial(keras.optimizers.Adam, 0.01, use_ema=True)
    skipping = trainer_of(optimizer=optimizer(), on_bad_step="skip", **options)
    result = skipping.fit((with_bad(37, 100), Y), epochs=2, **{**FIT, "verbose": 2})  # steps 3 and 7 of 10
    never = trainer_of(optimizer=optimizer(), **options)
    expected = never.fit(without(3, 7), epochs=2, **FIT)
    assert_same_state(skipping, never)
    assert result.steps == 20
    assert int(skipping.optimizer.iterations) == 16, "the schedule of the learning rate goes by updates"
    assert result.bad_steps == {"non_finite": 4, "spikes": 0, "rollbacks": []}
    assert result.history["bad_steps"] == [2, 2]
    for name in ("loss", *METRICS):
        assert result.history[name] == expected.history[name], name
    printed = capsys.readouterr().out
    assert "warning: step 3 (epoch 1) is skipped: NaN or infinite values in the data." in printed
    assert "warning: step 17 (epoch 2) is skipped: NaN or infinite values in the data." in printed
    assert "bad steps   4 NaN or infinite" in printed


def test_a_bad_gradient_of_a_finite_loss_is_skipped_and_its_variable_named(capsys):
    @tf.custom_gradient
    def root(x):
        return x, lambda upstream: upstream / (x * 0.0 + tf.cast(x > -10.0, x.dtype))

    class Rooted(keras.layers.Layer):
        def call(self, inputs):
            return root(inputs)

    def model():
        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(3), Rooted()])

    x = X.copy()
    skipping = trainer_of(model, "sgd", on_bad_step="skip")
    kernel = skipping.model.layers[0].kernel.numpy()
    x[37] = -200.0 * kernel[:, 0]  # an output below -10, where the gradient is infinite
    assert (x[37] @ kernel)[0] < -10
    result = skipping.fit((x, np.where(np.arange(SAMPLES) == 37, 1, Y)), epochs=1, **{**FIT, "verbose": 2})
    never = trainer_of(model, "sgd")
    never.fit(without(3), epochs=1, **FIT)
    assert_same_state(skipping, never)
    assert result.bad_steps["non_finite"] == 1
    said = "warning: step 3 (epoch 1) is skipped: NaN or infinity in the gradient of layers/0/"
    assert said in capsys.readouterr().out
    assert np.isfinite(result.history["loss"][0])


def test_sparse_gradients_are_looked_at():
    def model():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Embedding(20, 4), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential([keras.Input((2,), dtype="int32"), *layers])

    ids = RNG.integers(0, 20, (SAMPLES, 2))
    weights = np.ones(SAMPLES, "float32")
    weights[37] = np.inf
    skipping, never = trainer_of(model, "sgd", on_bad_step="skip"), trainer_of(model, "sgd")
    result = skipping.fit((ids, Y, weights), epochs=1, **FIT)
    kept = [i for i in range(SAMPLES) if i // BATCH != 2]
    never.fit((ids[kept], Y[kept], weights[kept]), epochs=1, **FIT)
    assert_same_state(skipping, never)
    assert result.bad_steps["non_finite"] == 1


def test_too_many_bad_steps_in_a_row_end_the_training():
    x = X.copy()
    x[3 * BATCH :] = np.inf
    said = r"4 steps in a row were bad \(step 4 \(epoch 1\): NaN or infinite values in the data\)\. .*max_bad_steps=3"
    with pytest.raises(NonFiniteError, match=said):
        trainer_of(on_bad_step="skip", max_bad_steps=3).fit((x, Y), epochs=1, **FIT, log_every=7)
    x[5 * BATCH : 6 * BATCH] = 1.0
    x[8 * BATCH : 9 * BATCH] = 1.0
    result = trainer_of(on_bad_step="skip", max_bad_steps=2).fit((x, Y), epochs=3, **FIT)
    assert result.bad_steps["non_finite"] == 3 * 5


@pytest.mark.extended  # several trainings
def test_an_overflow_of_float16_is_none_of_the_bad_steps():
    """The scale is far too high at first: steps are left out by it, until it fits."""

    def run(**options):
        inner = keras.optimizers.SGD(0.1)
        scaled = keras.optimizers.LossScaleOptimizer(inner, initial_scale=2.0**24, dynamic_growth_steps=1000)
        trainer = trainer_of(optimizer=scaled, precision="mixed_float16", accumulate=2, **options)
        return trainer, trainer.fit((X, Y), epochs=2, **FIT)

    (plain, _), (guarded, result) = run(), run(on_bad_step="skip", max_bad_steps=1)
    assert_same_state(guarded, plain)
    assert result.bad_steps["non_finite"] == 0
    assert result.skipped > 1
    assert float(guarded.optimizer.dynamic_scale) < 2.0**20


def test_a_loss_of_nan_does_not_lower_the_loss_scale():
    trainer = trainer_of(precision="mixed_float16", on_bad_step="skip")
    result = trainer.fit((with_bad(37), Y), epochs=1, **FIT)
    never = trainer_of(precision="mixed_float16")
    never.fit(without(3), epochs=1, **FIT)
    assert_same_state(trainer, never)
    assert (result.bad_steps["non_finite"], result.skipped) == (1, 0)


# -- spikes --


def spiking():
    """Twenty batches, in the last but one of which the inputs are so large that the loss jumps."""
    x, y = np.concatenate([X, X]), np.concatenate([Y, Y])
    x[18 * BATCH : 19 * BATCH] *= 1e3
    return x, y


@pytest.mark.extended
def test_a_spike_is_held_back():
    x, y = spiking()
    with pytest.raises(BadStepError, match=r"Step 19 \(epoch 1\) is bad: a loss of [\d.e+]+ where up to [\d.]+ is"):
        trainer_of(dense, "sgd", spike_threshold=20.0).fit((x, y), epochs=1, **FIT)
    skipping = trainer_of(dense, "sgd", on_bad_step="skip", spike_threshold=20.0)
    result = skipping.fit((x, y), epochs=1, **FIT)
    never = trainer_of(dense, "sgd")
    kept = [i for i in range(2 * SAMPLES) if i // BATCH != 18]
    never.fit((x[kept], y[kept]), epochs=1, **FIT)
    assert_same_state(skipping, never)
    assert result.bad_steps == {"non_finite": 0, "spikes": 1, "rollbacks": []}


def judged(guard, loss, weight=2.0, gradient=0.0):
    totals = tf.constant([loss * weight, weight, 0.0, gradient])
    updates = []
    found = GuardedTotals(*guard.unless_bad(totals, lambda: updates.append(1)).numpy().tolist())
    assert bool(updates) is (found.verdict == GOOD)
    return found


def test_the_limit_is_the_median_and_so_many_deviations():
    guard = StepGuard(BadStepConfig(spike_threshold=5.0), scaled=False)
    losses = np.random.default_rng(1).uniform(1.0, 2.0, HISTORY + 30).astype("float32").astype(float)
    for number, loss in enumerate(losses):
        known = losses[max(0, number - HISTORY) : number]
        expected = np.inf
        if len(known) >= FEWEST:
            median = np.median(known)
            expected = median + 5.0 * 1.4826 * np.median(np.abs(known - median))
        assert judged(guard, loss).limit == pytest.approx(expected, rel=1e-6), number
    assert guard.recent() == pytest.approx(losses[-HISTORY:])
    before = guard.recent()
    assert judged(guard, 50.0).verdict == SPIKE
    assert judged(guard, np.nan).verdict == NON_FINITE
    assert judged(guard, 1.5, gradient=np.nan).verdict == NON_FINITE
    assert judged(guard, 0.0, weight=0.0).verdict == GOOD
    assert guard.recent() == before, "neither bad losses nor those of no samples are compared with"
    other = StepGuard(BadStepConfig(spike_threshold=5.0), scaled=False)
    other.begin(before)
    assert judged(other, 1.25) == judged(guard, 1.25)
    assert other.recent() == guard.recent()


def test_where_the_loss_hardly_changes_a_small_step_is_no_spike():
    guard = StepGuard(BadStepConfig(spike_threshold=5.0), scaled=False)
    guard.begin([2.0] * 20)
    assert judged(guard, 2.09).verdict == GOOD
    assert judged(guard, 2.11).verdict == SPIKE


# -- rollback --


def test_a_rollback_is_going_on_from_the_checkpoint_without_the_batches_since(tmp_path, capsys):
    saves = Checkpoint(tmp_path / "saves", every=4, keep=10)
    rolled = trainer_of(on_bad_step="rollback")
    fit = {**FIT, "epochs": 2, "log_every": 3}
    result = rolled.fit((with_bad(5 * BATCH), Y), checkpoint=saves, **{**fit, "verbose": 2})  # step 6, seen after it
    assert result.bad_steps == {"non_finite": 2, "spikes": 0, "rollbacks": [[5, 6], [13, 16]]}
    assert result.history["bad_steps"] == [1, 1]
    assert result.steps == 20
    printed = capsys.readouterr().out
    assert "warning: step 6 (epoch 1) calls for a rollback: NaN or infinite values in the data." in printed
    assert "rolled back after step 6 to the checkpoint of step 4: the batches of steps 5 to 6 are left out." in printed

    never = trainer_of()
    x, y = without(5, 6)
    first = never.fit((x, y), **{**fit, "epochs": 1})
    again = np.r_[0 : 2 * BATCH, 6 * BATCH : SAMPLES]  # of the second epoch the third to the sixth
    second = never.fit((X[again], Y[again]), **{**fit, "epochs": 1})
    assert_same_state(rolled, never)
    for name in ("loss", *METRICS):
        assert result.history[name] == pytest.approx([first.history[name][0], second.history[name][0]], rel=1e-6), name


@pytest.mark.extended  # several trainings
def test_a_run_resumed_after_a_rollback_leaves_out_the_same_batches(tmp_path):
    """Killed right after the rollback: the state that it went back to was saved with its place in the data."""

    class Killed(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch, logs=None):
            self.steps += 1
            if self.steps == 9:
                raise KeyboardInterrupt

    bad = (with_bad(5 * BATCH), Y)
    fit = {**FIT, "epochs": 2, "log_every": 3}
    whole = trainer_of(on_bad_step="rollback")
    expected = whole.fit(bad, checkpoint=Checkpoint(tmp_path / "whole", every=5), **fit)
    saves = Checkpoint(tmp_path / "killed", every=5)
    with pytest.raises(KeyboardInterrupt):
        trainer_of(on_bad_step="rollback").fit(bad, checkpoint=saves, callbacks=[Killed()], **fit)
    newest = complete(Path(saves.folder))[-1]
    scalars = read_index(newest).scalars
    assert (scalars["step"], scalars["bad_steps"]["rollbacks"]) == (6, [[6, 6]])
    resumed = trainer_of(on_bad_step="rollback")
    assert resumed.resume(saves.folder) == newest
    result = resumed.fit(bad, checkpoint=saves, **fit)
    assert_same_state(resumed, whole)
    assert result.bad_steps == expected.bad_steps


def test_parameters_of_nan_are_rolled_back(tmp_path, capsys):
    """A learning rate that a callback sets for one step: the update itself overflows, of a finite gradient."""

    class Jump(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            self.model.optimizer.learning_rate = np.inf if batch == 4 else 0.01

    trainer = trainer_of(dense, keras.optimizers.SGD(0.01), on_bad_step="rollback")
    saves = Checkpoint(tmp_path, every=2)
    result = trainer.fit((X, Y), epochs=1, callbacks=[Jump()], checkpoint=saves, **{**FIT, "verbose": 2}, log_every=1)
    assert result.bad_steps["rollbacks"] == [[5, 5]]
    assert all(np.isfinite(weight).all() for weight in trainer.model.get_weights())
    assert "warning: parameters became NaN or infinite by step 5." in capsys.readouterr().out


def test_too_many_rollbacks_end_the_training(tmp_path):
    said = r"Training was rolled back 2 times, and another one is called for \(step 3 .*max_bad_steps=2"
    x = with_bad(*range(1, SAMPLES, BATCH))
    fit = {**FIT, "epochs": 3, "log_every": 2}
    with pytest.raises(NonFiniteError, match=said):
        trainer_of(on_bad_step="rollback", max_bad_steps=2).fit((x, Y), checkpoint=tmp_path, **fit)


@pytest.mark.parametrize(
    ("lose", "said"),
    [
        (lambda path: (path / "index.json").unlink(), "No checkpoint in .* is good: damaged are step-0"),
        (shutil.rmtree, "There is no checkpoint to roll back to: all were removed"),
    ],
    ids=["damaged", "removed"],
)
def test_a_rollback_without_a_good_checkpoint_is_an_error(tmp_path, lose, said):
    class Losing(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            for path in complete(tmp_path):
                lose(path)

    fit = {**FIT, "epochs": 1, "callbacks": [Losing()]}
    with pytest.raises(CheckpointError, match=said):
        trainer_of(on_bad_step="rollback").fit((with_bad(37), Y), checkpoint=tmp_path, **fit)


# -- what is refused --


def test_rollback_needs_checkpoints():
    with pytest.raises(ConfigError, match="on_bad_step='rollback' needs checkpoints") as error:
        trainer_of(on_bad_step="rollback").fit((X, Y), **FIT)
    assert "--on-bad-step rollback" in on_command_line(error.value.message)
    with pytest.raises(ConfigError, match="on_bad_step='rollback' needs checkpoints"):
        trainer_of(on_bad_step="rollback").train(None, Plan(1))
