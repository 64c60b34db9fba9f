"""What a replica without samples adds to a step: nothing, even where its placeholder overflows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.data.batch import Batch
from hvdtrain.layers.moments import moments_of_all
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.placeholder import counted
from hvdtrain.training.trainer import Trainer
from tests.distributed.world import grappler
from tests.extended import mostly_extended


class Counter(keras.layers.Layer):
    """Counts its calls in training."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


def model():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((2,))
    x = keras.layers.Dense(3)(keras.layers.BatchNormalization(momentum=0.5)(Counter()(inputs)))
    made = keras.Model(inputs, x)
    made.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return made


def passes(inputs, has_samples, *, jit=False, total=8):
    """Return what one forward and backward pass comes to, and the model."""
    built = model()
    state, backend = TrainState(built, built.optimizer, 0), SingleBackend(None)
    both = ForwardBackward(backend, state, StepLogs(backend, built, "train_step"), jit=jit)
    batch = Batch(inputs, tf.zeros([len(inputs), 3]), None, has_samples, total)
    local = tf.function(both, autograph=False)(batch)
    return local, built


@pytest.mark.parametrize(
    ("jit", "value", "has_samples"),
    mostly_extended(
        [
            (jit, value, samples)
            for jit in (False, True)
            for value in (1.0, np.inf, np.nan)
            for samples in (0.0, tf.constant(0.0))
        ],
        lambda jit, value, samples: jit == np.isnan(value) and value != np.inf,
        why="what is no number, compiled, and a number that is, each with both kinds of placeholder",
    ),
)
def test_a_placeholder_leaves_no_trace(has_samples, value, jit):
    local, built = passes(tf.fill([1, 2], np.float32(value)), has_samples, jit=jit)
    for gradient in local.gradients:
        np.testing.assert_array_equal(gradient, np.zeros(gradient.shape))
    np.testing.assert_array_equal(local.totals, [0.0, 0.0, 0.0])
    for new, old in zip(built.non_trainable_variables, model().non_trainable_variables, strict=True):
        np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize("has_samples", [1.0, tf.constant(1.0)], ids=["known before", "known when it runs"])
def test_samples_leave_theirs(has_samples):
    inputs = tf.random.stateless_normal([4, 2], [0, 0])
    local, built = passes(inputs, has_samples)
    assert all(np.abs(gradient).max() > 0 for gradient in local.gradients[2:])
    assert float(local.totals[1]) == 4.0
    norm = next(layer for layer in built.layers if isinstance(layer, keras.layers.BatchNormalization))
    np.testing.assert_allclose(norm.moving_mean, 0.5 * inputs.numpy().mean(0), rtol=1e-5)
    assert float(next(layer for layer in built.layers if isinstance(layer, Counter)).calls) == 1.0


def test_rows_are_left_out_like_dense_gradients():
    rows = tf.IndexedSlices(tf.constant([[np.inf], [1.0]]), tf.constant([0, 3]), tf.constant([5, 1]))
    left = counted(rows, tf.constant(0.0))
    np.testing.assert_array_equal(left.values, [[0.0], [0.0]])
    np.testing.assert_array_equal(left.indices, rows.indices)
    assert counted(None, tf.constant(0.0)) is None
    assert counted(rows, 1.0) is rows


@pytest.mark.parametrize("has_samples", [1.0, tf.constant(1.0), 0.0, tf.constant(0.0)])
def test_synchronized_statistics_hand_on_no_gradient_of_a_placeholder(has_samples):
    sent = []

    class Recording(SingleBackend):
        def all_reduce(self, tensor, *, name, **options):
            sent.append((name, tensor.numpy()))
            return tensor

    x = tf.constant([[1.0, 2.0], [3.0, 5.0]])
    with tf.GradientTape() as tape:
        tape.watch(x)
        mean, _ = moments_of_all(x, [0], None, Recording(None), "norm", has_samples=has_samples)
    tape.gradient(mean, x, output_gradients=tf.constant([np.nan, np.nan]))
    (_, local), (name, upstream) = sent
    assert name == "norm/backward"
    if float(has_samples):
        assert np.isnan(upstream).any()
    else:
        np.testing.assert_array_equal(upstream, np.zeros_like(upstream))
        np.testing.assert_array_equal(local, np.zeros_like(local))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@grappler()
def test_no_optimizer_of_graphs_takes_zero_times_a_sum_for_zero(jit, bad):
    """Grappler and XLA see the whole of it: a variable, an argument, and a constant factor."""
    weights = tf.Variable(tf.ones([4, 3]))

    @tf.function(autograph=False, jit_compile=jit)
    def poison(x):
        outputs = tf.nn.relu(x @ weights)
        return zero_if_finite([x, weights.read_value(), tf.reduce_sum(outputs, 1), tf.constant([1, 2])])

    x = np.ones((5, 4), np.float32)
    assert float(poison(tf.constant(x))) == 0.0
    x[3, 2] = bad
    assert np.isnan(float(poison(tf.constant(x))))
    weights.assign(tf.fill([4, 3], bad))
    assert np.isnan(float(poison(tf.ones([5, 4]))))


@pytest.mark.usefixtures("session")
def test_a_batch_without_samples_anywhere_keeps_statistics():
    """Keras' own become NaN, and stay so."""
    trained, x, y = model(), np.ones((8, 2), "float32"), np.ones((8, 3), "float32")
    data = tf.data.Dataset.from_tensor_slices((x, y, np.arange(8) < 4)).batch(4)
    data = data.map(lambda x, y, kept: (tf.boolean_mask(x, kept), tf.boolean_mask(y, kept)))
    Trainer(trained).fit(data, verbose=False)
    counter, normalization = trained.layers[1:3]
    np.testing.assert_allclose(normalization.moving_mean, 0.5 * np.ones(2))
    np.testing.assert_allclose(normalization.moving_variance, 0.5 * np.ones(2))
    assert float(counter.calls) == 1.0
