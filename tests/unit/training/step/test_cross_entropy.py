"""The fast cross-entropy gives what Keras' gives, where it is used."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.compat.keras import loss_of_function
from hvdtrain.training.step.cross_entropy import LEAST_CLASSES, fast_cross_entropy

OBJECT = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
FUNCTION = functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
SLOW_OP = "SparseSoftmaxCrossEntropyWithLogits"
RNG = np.random.default_rng(0)


def fast(loss):
    """Return the losses that a compiled loss has in a step."""
    made = loss if isinstance(loss, keras.losses.Loss) else loss_of_function()(loss)

    def losses(labels, logits):
        with fast_cross_entropy():
            return made.call(labels, logits)

    return losses


def case(shape, dtype="float32", spread=3.0):
    labels = tf.constant(RNG.integers(0, shape[-1], shape[:-1]))
    return labels, tf.constant(RNG.normal(0.0, spread, shape), dtype), tf.constant(RNG.random(shape[:-1]), dtype)


def outcome(losses_of, labels, logits, weights):
    """Losses and their gradient, as the compiled step has them."""

    @tf.function
    def run(labels, logits):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            losses = losses_of(labels, logits)
            total = tf.reduce_sum(losses * weights)
        return losses, tape.gradient(total, logits)

    return [value.numpy() for value in run(labels, logits)]


def ops_of(losses_of, labels, logits):
    return {op.type for op in tf.function(losses_of).get_concrete_function(labels, logits).graph.get_operations()}


SHAPES = [(7, 64), (4, 5, 100), (2, 3, 2, 1000)]
PAIRS = [
    pytest.param(loss, dtype, SHAPES[(i + j) % 3], spread, id=f"{name}-{dtype}-{spread}")
    for i, (name, loss, dtype) in enumerate(
        [("object", OBJECT, "float32"), ("function", FUNCTION, "float64"), ("object", OBJECT, "float64")]
    )
    for j, spread in enumerate([0.0, 3.0, 3e3])  # alike, usual, far apart
]


@pytest.mark.parametrize(("loss", "dtype", "shape", "spread"), PAIRS)
def test_losses_and_gradients_are_those_of_keras(loss, dtype, shape, spread):
    labels, logits, weights = case(shape, dtype, spread)
    keras_own = loss.call if loss is OBJECT else loss
    tolerance = 1e-6 if dtype == "float32" else 1e-13
    for mine, theirs in zip(
        outcome(fast(loss), labels, logits, weights), outcome(keras_own, labels, logits, weights), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=tolerance, atol=tolerance * max(1.0, spread))
    assert SLOW_OP not in ops_of(fast(loss), labels, logits)
    assert SLOW_OP in ops_of(keras_own, labels, logits)


def test_xla_compiles_it():
    labels, logits, weights = case((6, 100))

    def passes(losses_of):
        with tf.GradientTape() as tape:
            tape.watch(logits)
            losses = losses_of(labels, logits)
        return losses, tape.gradient(losses, logits, output_gradients=weights)

    compiled = tf.function(passes, jit_compile=True)
    for mine, theirs in zip(compiled(fast(OBJECT)), passes(OBJECT.call), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


def test_labels_of_other_types_and_a_dimension_of_one_more_fit():
    labels, logits, weights = case((6, 100))
    expected = outcome(OBJECT.call, labels, logits, weights)[0]
    for given in (tf.cast(labels, tf.uint8), tf.cast(labels, tf.float32), labels[:, tf.newaxis]):
        with fast_cross_entropy():
            mean = OBJECT(given, logits)
        np.testing.assert_allclose(mean, expected.mean(), rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_give_losses_that_are_not(value):
    labels, logits, weights = case((3, 100))
    spoilt = tf.tensor_scatter_nd_update(logits, [[1, 99]], [value])
    losses, gradient = outcome(fast(OBJECT), labels, spoilt, weights)
    for values in (losses, gradient.sum(-1)):
        assert np.isnan(values[1])
        assert np.isfinite(values[[0, 2]]).all()


def test_classes_that_are_ruled_out_by_minus_infinity_are_left_out():
    labels, logits, weights = tf.constant([0, 1, 2]), *case((3, 100))[1:]
    masked = tf.concat([logits[:, :64], tf.fill([3, 36], -np.inf)], 1)
    for mine, theirs in zip(
        outcome(fast(OBJECT), labels, masked, weights), outcome(OBJECT.call, labels, masked, weights), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("label", [-1, 100])
def test_a_label_that_is_no_class_is_an_error(label):
    _, logits, weights = case((3, 100))
    with pytest.raises(tf.errors.InvalidArgumentError, match=rf"indices\[.*\] = {label} is not in \[0, 100\)"):
        outcome(fast(OBJECT), tf.constant([0, label, 2]), logits, weights)


def test_a_second_derivative_is_refused():
    labels, logits, _ = case((3, 100))
    with tf.GradientTape() as outer:
        outer.watch(logits)
        with tf.GradientTape() as inner:
            inner.watch(logits)
            total = tf.reduce_sum(fast(OBJECT)(labels, logits))
        slope = inner.gradient(total, logits)
    with pytest.raises(LookupError, match="no second derivative"):
        outer.gradient(slope, logits)


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.SparseCategoricalCrossentropy(),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0),
        keras.losses.sparse_categorical_crossentropy,
        functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True, ignore_class=0),
        functools.partial(keras.losses.sparse_categorical_crossentropy, from_logits=True, axis=1),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, axis=1),
        keras.losses.CategoricalCrossentropy(from_logits=True),
    ],
)
def test_other_losses_stay_as_they_are(loss):
    labels, logits, _ = case((100, 100))
    labels = logits if isinstance(loss, keras.losses.CategoricalCrossentropy) else labels
    graph = tf.function(fast(loss)).get_concrete_function(labels, logits).graph
    assert not [op for op in graph.get_operations() if "probability_of_label" in op.name]


@pytest.mark.parametrize("loss", [OBJECT, FUNCTION], ids=["object", "partial"])
@pytest.mark.parametrize("classes", [10, LEAST_CLASSES - 1])
def test_losses_of_few_classes_are_those_of_keras(loss, classes):
    labels, logits, _ = case((6, classes))
    keras_own = loss.call if loss is OBJECT else loss
    np.testing.assert_array_equal(fast(loss)(labels, logits), keras_own(labels, logits))


def test_few_classes_and_strategies_stay_with_the_op_of_tensorflow():
    labels, logits, _ = case((6, LEAST_CLASSES - 1))
    assert SLOW_OP in ops_of(fast(OBJECT), labels, logits)
    labels, logits, _ = case((6, LEAST_CLASSES))
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        assert SLOW_OP in ops_of(fast(OBJECT), labels, logits)
    assert SLOW_OP not in ops_of(fast(OBJECT), labels, logits)
