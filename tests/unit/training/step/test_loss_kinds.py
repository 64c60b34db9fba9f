"""Which numbers of a step are means over its samples, and which are sums."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import NoOpCollectives, SingleBackend
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import as_batch
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.loss_kinds import kinds_of
from hvdtrain.training.step.loss_terms import Kinds, LossTerms
from hvdtrain.training.step.optimizers import unapplied
from hvdtrain.training.step.samples_apart import inspect_forward, inspect_losses, may_form_sums

X = np.random.default_rng(0).standard_normal((6, 3)).astype("float32")


def model_with(loss_of, *, layers=(), compute=False):
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([*layers, keras.layers.Dense(2)])
            self.seen = keras.metrics.Mean(name="seen")
            self.steps = tf.Variable(0, trainable=False)

        def call(self, inputs, training=False):
            return self.inner(inputs, training=training)

        def train_step(self, inputs):
            self.steps.assign_add(1)
            with tf.GradientTape() as tape:
                loss = loss_of(self(inputs, training=True))
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            self.seen.update_state(loss)
            return {"seen": self.seen.result(), "loss": loss}

    keras.utils.set_random_seed(0)
    model = Own()
    model(X)
    model.compile("sgd")
    return model


def found(model):
    backend = SingleBackend(None)
    batch = as_batch(tf.constant(X), 1.0, len(X))
    logs = StepLogs(backend, model, "train_step")
    before = [np.array(variable.numpy()) for variable in [*model.variables, *model.seen.variables]]
    kinds, warnings = kinds_of(model, batch, partial(unapplied, model), logs=logs, replicas=backend)
    assert int(model.steps) == 0
    after = [np.array(variable.numpy()) for variable in [*model.variables, *model.seen.variables]]
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)
    return kinds, warnings


def squares(outputs):
    return tf.reduce_sum(tf.square(outputs), -1)


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (lambda outputs: tf.reduce_mean(squares(outputs)), "mean"),
        (lambda outputs: tf.reduce_sum(squares(outputs)), "sum"),
        (lambda outputs: tf.nn.compute_average_loss(squares(outputs), global_batch_size=64), "sum"),
        (lambda outputs: tf.nn.compute_average_loss(squares(outputs)), "mean"),
    ],
)
@pytest.mark.parametrize("layers", [[], [keras.layers.Dropout(0.1)], [keras.layers.BatchNormalization()]])
def test_a_mean_stays_for_twice_the_samples_and_a_sum_doubles(loss, kind, layers):
    kinds, warnings = found(model_with(loss, layers=[type(layer).from_config(layer.get_config()) for layer in layers]))
    assert (kinds.targets, kinds.means) == ((kind,), (kind,))
    assert kinds.figures == ({"loss"} if kind == "sum" else set())
    assert not warnings


def test_a_loss_over_pairs_of_samples_is_named():
    model = model_with(lambda outputs: tf.reduce_mean(tf.reduce_logsumexp(outputs @ tf.transpose(outputs), 1)))
    kinds, warnings = found(model)
    assert kinds.targets == ("mean",)
    assert len(warnings) == 1
    assert "the loss of Own is neither a mean nor a sum over the samples" in warnings[0]
    assert "hvdtrain.all_gather(embeddings)" in warnings[0]


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs: tf.reduce_mean(tf.square(outputs @ tf.transpose(outputs))),
        lambda outputs: tf.reduce_mean(tf.math.reduce_variance(outputs, 0)),
        lambda outputs: tf.math.divide_no_nan(tf.reduce_sum(tf.nn.relu(outputs)), tf.reduce_sum(outputs**2)),
    ],
    ids=["all pairs", "covariance", "own divisor"],
)
def test_a_mean_that_is_not_that_of_its_halves_is_named(loss):
    kinds, warnings = found(model_with(loss))
    assert kinds.targets == ("mean",)
    assert len(warnings) == 1
    assert "halves of a batch do not give that of the batch" in warnings[0]
    assert not found(model_with(loss, layers=[keras.layers.BatchNormalization()]))[1], "its statistics are of a batch"


def test_of_gradients_that_overflow_nothing_is_said():
    """As those of a scaled loss are in the first steps in float16."""
    infinite = model_with(lambda outputs: tf.reduce_mean(outputs) * np.float32(np.inf))
    assert found(infinite) == found(model_with(lambda outputs: tf.reduce_mean(outputs)))


def over_pairs(targets, outputs):
    return tf.reduce_mean(tf.square(outputs @ tf.transpose(outputs)), -1)


class Pairs(keras.losses.Loss):
    def call(self, targets, outputs):
        return over_pairs(targets, outputs)


def squared(targets, outputs):
    return tf.reduce_sum(tf.square(outputs - targets), -1)


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (keras.losses.Circle(), "circle"),
        (keras.losses.CosineSimilarity(axis=0), "cosine_similarity"),
        (over_pairs, "over_pairs"),
        (Pairs(name="pairs"), "pairs"),
        (squared, None),
        (keras.losses.CosineSimilarity(axis=-1), None),
        ("mse", None),
    ],
)
def test_a_compiled_loss_that_compares_samples_is_named(loss, named):
    model = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    is_circle = isinstance(loss, keras.losses.Circle)
    targets = tf.constant([0, 1, 0, 1, 1]) if is_circle else tf.ones([5, 2])
    batch = as_batch((tf.constant(X[:5]), targets), 1.0, 5)
    model.test_step((batch.inputs, batch.targets))  # builds the losses
    before = [np.array(variable.numpy()) for variable in model.variables]
    batch_means, warnings = inspect_losses(model, batch)
    assert not batch_means
    assert len(warnings) == (named is not None), warnings
    assert named is None or f"the loss of {named} is neither a mean nor a sum over the samples" in warnings[0]
    for variable, value in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def compiled_with(loss):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss)
    model.test_step((X, tf.ones([6, 2])))  # builds the losses
    return model, as_batch((tf.constant(X), tf.ones([6, 2])), 1.0, 6)


def test_a_compiled_loss_may_be_one_mean_over_the_batch():
    model, batch = compiled_with(lambda targets, outputs: tf.reduce_mean(squared(targets, outputs)))
    assert inspect_losses(model, batch) == (True, [])


def total(targets, outputs):
    return tf.reduce_sum(squared(targets, outputs))


def ratio(targets, outputs):
    return tf.reduce_sum(outputs * targets) / tf.reduce_sum(outputs**2 + targets)


def padding_aside(ignored):
    """Return a mean over the labels that are not `ignored`, as tutorials of translation have it."""

    def masked(labels, logits):
        mask = tf.cast(labels != ignored, logits.dtype)
        values = keras.losses.sparse_categorical_crossentropy(tf.maximum(labels, 0), logits, from_logits=True)
        return tf.reduce_sum(values * mask) / tf.reduce_sum(mask)

    return masked


@pytest.mark.parametrize("ignored", [0, -1])
def test_a_mean_over_labels_but_padding_is_refused_even_where_the_first_batch_has_none(ignored):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", padding_aside(ignored))
    labels = tf.constant([1, 2, 3, 1, 2, 3])
    model.test_step((X, labels))
    with pytest.raises(ConfigError, match="The loss 'masked' returns one number for the whole batch"):
        inspect_losses(model, as_batch((tf.constant(X), labels), 1.0, 6))


@pytest.mark.parametrize("loss", [total, ratio])
def test_one_number_for_the_batch_that_is_not_its_mean_is_refused(loss):
    with pytest.raises(ConfigError, match=f"The loss '{loss.__name__}' returns one number for the whole batch"):
        inspect_losses(*compiled_with(loss))


@pytest.mark.parametrize(
    ("loss", "weight", "message"),
    [
        (keras.losses.dice, None, "The loss 'dice' returns one number for the whole batch"),
        (lambda y, p: tf.reduce_mean(y - p), tf.ones([6]), "The loss 'lambda' returns one number"),
        (keras.losses.MeanSquaredError(reduction=None), None, "'mean_squared_error' has reduction=None"),
    ],
)
def test_a_loss_of_a_slice_that_cannot_be_summed_is_named(loss, weight, message):
    model, batch = compiled_with(loss)
    batch_means, _ = inspect_losses(model, batch)
    one = tf.ones([], tf.float64)
    terms = LossTerms(
        model=model,
        collectives=NoOpCollectives(),
        samples=one,
        total=one,
        whole=False,
        kinds=Kinds(batch_means=batch_means),
    )
    with terms.corrected(), pytest.raises(ConfigError, match=message):
        model.compute_loss(batch.inputs, batch.targets, model(batch.inputs), weight)


def test_what_is_random_is_not_judged_to_the_last_digit():
    kinds, warnings = found(model_with(lambda outputs: tf.reduce_mean(outputs + tf.random.normal([])) + 30.0))
    assert kinds.targets == ("mean",)
    assert not warnings


def test_a_sum_that_a_function_may_hide_is_named():
    @tf.function
    def differentiated(model, inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(inputs, training=True))
        return loss, tape.gradient(loss, model.trainable_variables)

    model = model_with(None)

    def train_step(inputs):
        loss, gradients = differentiated(model, inputs)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return {"loss": loss}

    type(model).train_step = lambda self, inputs: train_step(inputs)
    kinds, warnings = found(model)
    assert kinds.targets == ("mean",)
    assert kinds.figures == {"loss"}
    assert len(warnings) == 1
    assert "returns a sum over the samples (loss) and differentiates within a tf.function" in warnings[0]


def test_an_added_loss_that_is_neither_is_refused():
    class Spread(keras.layers.Layer):
        def call(self, inputs):
            self.add_loss(tf.reduce_max(inputs) * tf.cast(tf.shape(inputs)[0], tf.float32) ** 2)
            return inputs

    model = model_with(tf.reduce_mean, layers=[Spread()])
    with pytest.raises(ConfigError, match=r"Spread 'spread\S*' adds a loss that is neither a mean nor a sum"):
        found(model)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda gradients: gradients, False),
        (lambda gradients: [2.0 * each for each in gradients], False),
        (lambda gradients: tf.clip_by_global_norm(gradients, 0.01)[0], True),
        (lambda gradients: [tf.math.l2_normalize(each) for each in gradients], True),
        (lambda gradients: [tf.sign(each) for each in gradients], True),
    ],
)
def test_gradients_that_a_step_changes_are_named(change, named):
    model = model_with(None)

    def train_step(self, inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squares(self(inputs, training=True)))
        gradients = change(tape.gradient(loss, self.trainable_variables))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}

    type(model).train_step = train_step
    _, warnings = found(model)
    assert len(warnings) == named
    assert not named or "train_step of Own applies gradients of which those of a batch are none" in warnings[0]


@pytest.mark.parametrize(
    ("numbers", "named"),
    [
        (lambda seen, loss: {"seen": seen.result(), "loss": loss}, None),
        (lambda seen, loss: {"seen": seen.result(), "root": tf.sqrt(seen.result() + 1.0)}, "root"),
        (lambda seen, loss: {"loss": loss, "ratio": tf.cond(loss > 0, seen.result, lambda: 1.0) / loss}, "ratio"),
    ],
)
def test_numbers_of_metrics_results_are_named(numbers, named):
    model = model_with(None)

    def train_step(self, inputs):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(squares(self(inputs, training=True)))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.seen.update_state(loss)
        return numbers(self.seen, loss)

    type(model).train_step = train_step
    _, warnings = found(model)
    assert [f"train_step of Own computes {named} from results of metrics" in text for text in warnings] == (
        [True] if named else []
    )


class OfBatch(keras.layers.Layer):
    def call(self, inputs):
        return inputs + tf.reduce_mean(tf.math.reduce_std(inputs, 0))


@pytest.mark.parametrize(("layer", "named"), [(OfBatch(), True), (keras.layers.BatchNormalization(), False)])
def test_outputs_that_depend_on_other_samples_are_named(layer, named):
    outputs = {"a": keras.layers.Dense(2), "b": keras.layers.Dense(1)}
    inputs = keras.Input((3,))
    hidden = layer(inputs)
    model = keras.Model(inputs, {name: each(hidden) for name, each in outputs.items()})
    model.compile("sgd", "mse")
    batch = as_batch((tf.constant(X), {"a": tf.constant(X[:, :2]), "b": tf.constant(X[:, :1])}), 1.0, len(X))
    warnings = inspect_forward(model, batch, StepLogs(SingleBackend(None), model, "train_step"))
    assert len(warnings) == named
    assert not named or "are others beside other samples" in warnings[0]


def test_outputs_that_are_no_numbers_are_passed_over():
    class Told(keras.Model):
        def call(self, inputs):
            return {"none": None, "rows": tf.shape(inputs)[0], "values": inputs}

    model = Told()
    model.compile("sgd")
    batch = as_batch(tf.constant(X), 1.0, len(X))
    assert inspect_forward(model, batch, StepLogs(SingleBackend(None), model, "train_step")) == []


def sparsity(activations):
    return tf.reduce_sum(tf.square(tf.reduce_mean(activations, 0)))


def test_an_own_activity_regularizer_is_looked_at():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activity_regularizer=sparsity)])
    assert may_form_sums(model)
    assert not may_form_sums(keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activity_regularizer="l2")]))
    model.compile("sgd", "mse")
    batch, backend = as_batch((tf.constant(X), tf.zeros([6, 4])), 1.0, 6), SingleBackend(None)
    logs = StepLogs(backend, model, "train_step")
    with pytest.raises(ConfigError, match="divides what an activity regularizer returns by the samples"):
        kinds_of(model, batch, lambda batch, noted: model(batch.inputs), logs=logs, replicas=backend)


def test_a_mean_of_labels_that_must_be_classes_is_known():
    def mean_loss(labels, logits):
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4)])
    model.compile("sgd", mean_loss)
    model.evaluate(X, np.arange(6) % 4, verbose=0)
    batch = as_batch((tf.constant(X), tf.constant(np.arange(6) % 4)), 1.0, 6)
    assert inspect_losses(model, batch) == (True, [])


class Adds(keras.layers.Layer):
    def __init__(self, loss_of, in_training_only=False):
        super().__init__(name="adds")
        self.loss_of, self.in_training_only = loss_of, in_training_only

    def call(self, inputs, training=False):
        if training or not self.in_training_only:
            self.add_loss(self.loss_of(inputs))
        return inputs


@pytest.mark.parametrize("in_training_only", [False, True])
@pytest.mark.parametrize(
    ("loss_of", "adds_up"),
    [
        (lambda x: tf.reduce_mean(tf.square(x)), True),
        (lambda x: tf.reduce_sum(tf.abs(x)), True),
        (lambda x: tf.square(x[:, 0]), True),
        (lambda x: tf.constant(2.0), True),
        (lambda x: tf.reduce_mean(tf.math.reduce_std(x, 0)), False),
        (lambda x: tf.sqrt(tf.reduce_mean(tf.square(x))), False),
        (lambda x: tf.reduce_max(tf.abs(x)), False),
        (lambda x: tf.reduce_sum(tf.square(tf.reduce_mean(x, 0))), False),
        (lambda x: tf.square(tf.norm(x)) / tf.reduce_sum(tf.abs(x)), False),
    ],
)
def test_an_added_loss_of_samples_together_is_named(loss_of, adds_up, in_training_only):
    layers = [] if in_training_only else [keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((3,)), Adds(loss_of, in_training_only), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    batch = as_batch((tf.constant(X), tf.constant(X[:, :1])), 1.0, len(X))
    before = model.get_weights()
    warnings = inspect_forward(model, batch, StepLogs(SingleBackend(None), model, "train_step"))
    assert len(warnings) == (not adds_up)
    assert adds_up or "the loss that Adds 'adds' adds is neither a mean nor a sum" in warnings[0]
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_models_of_kerass_own_code_need_no_look():
    assert not may_form_sums(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    assert may_form_sums(model_with(tf.reduce_mean))
