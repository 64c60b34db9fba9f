"""State, metrics, statistics, randomness and checkpoints on all ranks."""

from dataclasses import asdict, replace
from itertools import product
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from world import World, flat_bytes
from worlds import worlds

import hvdtrain
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError, DesyncError, NonFiniteError
from hvdtrain.data.pipeline import SourceTraining
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan


def classifier(seed: int, *middle: Any) -> keras.Model:
    keras.utils.clear_session(free_memory=False)  # the same names in every model
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), *middle, keras.layers.Dense(3)]
    )


def samples(count: int = 50) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((count, 5)).astype("float32"), rng.integers(0, 3, count)


CROSSENTROPY = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_evaluation_is_that_of_one_process(world: World) -> None:
    x, y = samples(101)
    model = classifier(0)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    trainer = hvdtrain.Trainer(model, "sgd", CROSSENTROPY, metrics, backend=world.backend)
    for batch in (16, 7, 1000):
        outcome = trainer.evaluate((x, y), batch=batch, return_dict=True)
        logits = model(x).numpy()
        assert round(outcome["accuracy"] * 101) == int((logits.argmax(1) == y).sum())
        top2 = np.argsort(-logits, axis=1)[:, :2]
        assert round(outcome["top2"] * 101) == int((top2 == y[:, None]).any(1).sum())
        np.testing.assert_allclose(outcome["loss"], float(CROSSENTROPY(y, logits)), rtol=1e-6)


def check_metrics_with_counts_are_added_up(world: World) -> None:
    x, _ = samples(64)
    y = (x[:, 0] > 0).astype("float32")[:, None]
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1, activation="sigmoid")])
    keras.utils.set_random_seed(0)
    model.layers[0].kernel.assign(np.linspace(-1, 1, 5, dtype="float32")[:, None])
    metrics = [keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")]
    trainer = hvdtrain.Trainer(model, "sgd", "binary_crossentropy", metrics, backend=world.backend)
    outcome = trainer.evaluate((x, y), batch=10, return_dict=True)
    for metric in (keras.metrics.AUC(name="auc"), keras.metrics.Precision(name="precision")):
        metric.update_state(y, model(x))
        np.testing.assert_allclose(outcome[metric.name], float(metric.result()), rtol=1e-6)


class Largest(keras.metrics.Metric):
    """The largest output so far: no sum over samples."""

    def __init__(self, name: str = "largest") -> None:
        super().__init__(name=name)
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.reduce_max(tf.abs(y_pred))))

    def result(self) -> Any:
        return self.value


def overlap(y_true: Any, y_pred: Any) -> Any:
    """One number for a whole batch, as a Dice coefficient is."""
    labels = tf.one_hot(tf.cast(tf.reshape(y_true, [-1]), tf.int32), y_pred.shape[-1])
    shares = tf.nn.softmax(y_pred)
    return 2 * tf.reduce_sum(labels * shares) / (tf.reduce_sum(labels) + tf.reduce_sum(shares**2))


@worlds("mpirun-2", extended=True)
def check_a_metric_that_is_no_sum_is_keras_or_is_refused_by_name(world: World) -> None:
    """Where a step sees the whole batch, so do metrics of one's own; else they cannot be added up."""
    for metric, name in ((Largest, "largest"), (lambda: overlap, "overlap")):
        plain = classifier(0)
        plain.compile("sgd", CROSSENTROPY, metrics=[metric()])
        expected = plain.fit(*samples(), batch_size=16, shuffle=False, verbose=0).history[name]
        trainer = hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, [metric()], backend=world.backend)
        found = trainer.fit(samples(), batch=16, shuffle=False, verbose=0).history[name]
        np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=name)
        evaluated = plain.evaluate(*samples(), batch_size=16, verbose=0, return_dict=True)[name]
        found = trainer.evaluate(samples(), batch=16, verbose=0, return_dict=True)[name]
        np.testing.assert_allclose(found, evaluated, rtol=1e-5, err_msg=name)
    for use, options in product(("fit", "evaluate"), ({"whole_batch": False}, {"jit": True})):
        trainer = hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, [Largest()], backend=world.backend, **options)
        if options == {"jit": True} and use == "evaluate":  # which XLA has no part in
            trainer.evaluate(samples(), batch=16, verbose=False)
            continue
        try:
            getattr(trainer, use)(samples(), batch=16, verbose=False)
        except ConfigError as error:
            assert "Received: 'largest', a Largest" in str(error)
        else:
            raise AssertionError(f"the metric was added up by {use} with {options}")


@worlds("mpirun-2", "gloo-1", "gloo-4", extended=True)
def check_batchnorm_statistics_are_averaged(world: World) -> None:
    model = classifier(world.rank, keras.layers.BatchNormalization(momentum=0.5, name="norm"))
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.1), CROSSENTROPY, backend=world.backend)
    data = training_data(samples(), world.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    norm, average = model.get_layer("norm"), trainer.state.average_statistics
    before: list[np.ndarray] = []

    def noted(backend: Any, trainers: int | None) -> None:
        before.append(np.array(norm.moving_mean))
        average(backend, trainers)

    trainer.state.average_statistics = noted
    trainer.train(data, Plan(3))
    (local,) = before
    if world.size > 1:
        assert not world.same_everywhere(local.tobytes()), "the ranks saw different batches"
    means = [np.frombuffer(part, "float32") for part in world.gather(local.tobytes())]
    np.testing.assert_allclose(norm.moving_mean, np.mean(means, axis=0), rtol=1e-6)
    trainer.state.agreed_hash(world.backend)


@worlds("mpirun-2")
@worlds("gloo-4", extended=True)
def check_the_hash_notices_a_rank_that_drifted(world: World) -> None:
    trainer = hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, backend=world.backend)
    trainer.fit(samples(), batch=16, verbose=False)
    trainer.state.agreed_hash(world.backend)
    if world.rank == 1:
        kernel = trainer.model.trainable_variables[0]
        kernel.assign(np.nextafter(np.array(kernel), np.float32(9)))
    try:
        trainer.state.agreed_hash(world.backend)
    except DesyncError as error:
        assert "rank 1" in str(error)
    else:
        raise AssertionError("a difference in the last bit went unnoticed")


class Drawn(keras.layers.Layer):
    """Remembers the masks that dropout drew last, of eight samples."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5)
        # A tf.Variable is no part of the model's state, which is averaged over the ranks at the end.
        self.mask = tf.Variable(tf.zeros((8, 8)), trainable=False)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        outputs = self.dropout(inputs, training=training)
        if training:  # a batch of evaluation may be smaller, and draws nothing
            self.mask.assign(tf.cast(outputs[:8] != 0, tf.float32))
        return outputs


@worlds("mpirun-2", extended=True)
def check_dropout_differs_by_rank_and_is_reproducible(world: World) -> None:
    def mask_after(steps: int) -> bytes:
        layer = Drawn()
        # With the whole batch, as the layer of its own would have it, the ranks draw the numbers of one process.
        trainer = hvdtrain.Trainer(
            classifier(0, layer),
            keras.optimizers.SGD(0.0),
            CROSSENTROPY,
            backend=world.backend,
            whole_batch=False,
        )
        data = training_data(samples(64), world.backend, batch=32, seed=0, shuffle=False, steps_per_epoch=None)
        trainer.build(data)
        trainer.train(data, Plan(steps))
        return np.array(layer.mask).tobytes()

    second, third = mask_after(2), mask_after(3)
    assert second == mask_after(2), "the same run drew another mask"
    assert second != third, "two steps drew the same mask"
    if world.size > 1:
        assert len(set(world.gather(second + third))) == world.size, "two ranks drew the same masks"


def check_a_nan_is_named_with_its_step(world: World) -> None:
    x, y = samples(48)
    x[37, 0] = np.nan  # batch 3 of 16 samples, on one rank only
    trainer = hvdtrain.Trainer(classifier(0), keras.optimizers.SGD(0.1), CROSSENTROPY, backend=world.backend)
    try:
        trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False, log_every=100)
    except NonFiniteError as error:
        assert "data hold NaN or infinite values at step 3 " in str(error), error
    else:
        raise AssertionError("a NaN went unnoticed")


@worlds("mpirun-2", extended=True)
def check_a_diverging_loss_is_named_with_its_step(world: World) -> None:
    x, y = samples(64)
    trainer = hvdtrain.Trainer(classifier(0), keras.optimizers.SGD(1e38), CROSSENTROPY, backend=world.backend)
    try:
        trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False, log_every=100)
    except NonFiniteError as error:
        # The first update makes weights of 1e36, the second overflows.
        assert "loss became NaN or infinite at step 3 " in str(error), error
    else:
        raise AssertionError("a loss of NaN went unnoticed")


@worlds("mpirun-2", extended=True)
def check_parameters_that_an_activation_hides_are_noticed(world: World) -> None:
    """A NaN in the data that ReLU turns into zeros: the loss stays finite, the first layer is lost."""
    x, y = samples(64)
    x[20, 0] = np.nan  # in the second batch
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, activation="relu"), keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, keras.optimizers.SGD(0.1), CROSSENTROPY, backend=world.backend)
    try:
        trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False, log_every=100)
    except NonFiniteError as error:
        assert "at step 2 " in str(error), error
    else:
        raise AssertionError("parameters of NaN went unnoticed")


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_resume_goes_on_as_if_nothing_had_happened(world: World) -> None:
    """Nine steps, a checkpoint, a fresh trainer on every rank, nine more: the weights of eighteen at a stretch."""

    def fresh(seed: int) -> tuple[Any, SourceTraining]:
        trainer = hvdtrain.Trainer(
            classifier(seed, keras.layers.Dropout(0.3)),
            keras.optimizers.Adam(0.01),
            CROSSENTROPY,
            seed=5,
            backend=world.backend,
        )
        data = training_data(samples(), world.backend, batch=16, seed=5, shuffle=True, steps_per_epoch=None)
        trainer.build(data)
        return trainer, data

    def save(state: Any) -> None:
        checkpointer.save(state.scalars.step, state.named_tensors(), asdict(state.scalars))

    whole, data = fresh(0)
    whole.train(data, Plan(18))
    # Only rank 0 needs to see the files.
    folder = world.folder / ("resume" if world.rank == 0 else "not there")
    checkpointer = Checkpointer(folder, keep=2, backend=world.backend)
    first, data = fresh(0)
    first.train(data, Plan(9, checkpoint_every=3), save=save)
    second, data = fresh(77 + world.rank)
    second.restore(checkpointer.find())
    second.train(data, Plan(18))
    assert second.state.scalars.step == 18
    assert world.same_everywhere(flat_bytes(second.model.get_weights()))
    for a, b in zip(second.model.get_weights(), whole.model.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0 if world.size <= 2 else 1e-6)
    if world.rank == 0:
        assert sorted(p.name for p in (world.folder / "resume").iterdir()) == ["step-00000006", "step-00000009"]


@worlds("mpirun-2", "mpirun-1", "mpirun-4", extended=True)
def check_digits_reaches_its_accuracy(world: World) -> None:
    """Over five seeds in one process; more ranks train the same model, which one seed shows."""
    from hvdtrain.models.registry import build_model
    from hvdtrain.recipes import recipe
    from hvdtrain.runs.run_data import run_data
    from hvdtrain.runs.trainers import run_trainer

    base = recipe("digits")
    source = run_data(base, world.backend)
    trainer = run_trainer(base, source, world.backend)
    trainer.build(source.training)
    start = {path: tensor.value.numpy() for path, tensor in trainer.state.named_tensors().items()}
    for seed in range(5 if world.size == 1 else 1):
        # What is compiled serves again: weights and order are those of another seed, all else is as in the beginning.
        for path, tensor in trainer.state.named_tensors().items():
            tensor.value.assign(start[path])
        splits = source.splits
        trainer.model.set_weights(build_model(base.model, splits.sample_shape, splits.classes, seed).get_weights())
        trainer.state.restore({"seed": seed})
        config = replace(base, training=replace(base.training, seed=seed))
        data = run_data(config, world.backend)
        trainer.train(data.training, Plan(base.training.epochs * data.training.steps_per_epoch, log_every=1))
        accuracy = trainer.evaluate_on(data.validation).metrics["accuracy"]
        assert accuracy >= 0.97, (seed, accuracy)
        trainer.state.agreed_hash(world.backend)
