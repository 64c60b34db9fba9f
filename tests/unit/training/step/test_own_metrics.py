"""Metrics of one's own, where each rank counts its own samples: sums, or refused by name."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from hvdtrain.config.errors import ConfigError
from hvdtrain.training.step.own_metrics import only_added_to

TERM = {"shape": [], "dtype": "float32"}


class Own(keras.metrics.Metric):
    """Has two numbers, which `update` changes."""

    def __init__(self, update):
        super().__init__(name="own")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.other = self.add_weight(name="other", initializer="zeros")
        self.update = update

    def update_state(self, term):
        self.update(self, term)


def traced(metric, *specs):
    with only_added_to([metric]):
        tf.function(metric.update_state, autograph=False).get_concrete_function(*specs)


@pytest.mark.parametrize(
    "update",
    [
        lambda own, x: own.total.assign_add(x),
        lambda own, x: own.total.assign(own.total + x),
        lambda own, x: own.total.assign(ops.add(x, own.total)),
        lambda own, x: own.total.assign(ops.cast(ops.convert_to_tensor(own.total) + x, "float32")),
        lambda own, x: own.total.assign_sub(x),
        lambda own, x: (own.total.assign_add(x), own.other.assign(own.other + ops.square(x))),
        lambda own, x: tf.cond(x > 0, lambda: own.total.assign_add(x), lambda: own.total.value),
    ],
)
def test_what_adds_to_a_variable_is_a_sum(update):
    traced(Own(update), tf.TensorSpec(**TERM))


@pytest.mark.parametrize(
    "update",
    [
        lambda own, x: own.total.assign(ops.maximum(own.total, x)),
        lambda own, x: own.total.assign(x),
        lambda own, x: own.total.assign(0.9 * own.total + 0.1 * x),
        lambda own, x: own.total.assign(own.total + own.total * x),
        lambda own, x: own.total.assign(own.other + x),
        lambda own, x: own.total.assign(x - own.total),
        lambda own, x: own.total.assign_add(x - own.total),
        lambda own, x: own.total.assign(3.0),
        lambda own, x: tf.cond(x > 0, lambda: own.total.assign(x), lambda: own.total.value),
    ],
)
def test_what_changes_a_variable_otherwise_is_refused_by_name(update):
    with pytest.raises(ConfigError, match="'own', a Own, which changes its variable 'total' otherwise than by adding"):
        traced(Own(update), tf.TensorSpec(**TERM))


def test_variables_are_what_they_were_afterwards():
    metric = Own(lambda own, x: own.total.assign(x))
    with only_added_to([metric]), pytest.raises(ConfigError):
        tf.function(metric.update_state, autograph=False)(tf.constant(2.0))
    metric.update_state(2.0)
    assert float(metric.total) == 2.0


NEEDS = {
    "IoU": {"num_classes": 2, "target_class_ids": [0]},
    "BinaryIoU": {},
    "MeanIoU": {"num_classes": 2},
    "OneHotIoU": {"num_classes": 2, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 2},
    "MeanRelativeError": {"normalizer": np.ones(2, "float32")},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
}
LABELS = ("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy")
NOT_TWO_TENSORS = ("Metric", "Mean", "Sum")
CLASSES = sorted(
    name
    for name, each in vars(keras.metrics).items()
    if inspect.isclass(each) and issubclass(each, keras.metrics.Metric) and name not in NOT_TWO_TENSORS
)


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_ones_own_that_derives_from_one_of_keras_counts_by_sums(name):
    metric = type(f"Own{name}", (getattr(keras.metrics, name),), {})(**NEEDS.get(name, {}))
    outputs = tf.TensorSpec([8, 2], tf.float32)
    targets = tf.TensorSpec([8], tf.int32) if name in LABELS else outputs
    if not metric.variables:  # built by its first batch
        metric.update_state(tf.zeros(targets.shape, targets.dtype), tf.zeros(outputs.shape))
    traced(metric, targets, outputs)
