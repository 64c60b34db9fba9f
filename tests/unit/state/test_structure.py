"""Structural paths: the same for every instance of a model, in every process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.optim.precision import LossScaleOptimizer
from hvdtrain.state.optimizers import slot_tensors
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import unique_paths
from tests.extended import mostly_extended


class Block(keras.layers.Layer):
    """Attributes of all kinds, and variables without names."""

    def __init__(self):
        super().__init__()
        self.scales = [self.add_weight(shape=(2,)), self.add_weight(shape=(2,))]
        self._hidden = self.add_weight(shape=(2,), name="given")
        self.branches = {"left": keras.layers.Dense(2), "right": [keras.layers.Dense(2)]}
        self.count = self.add_weight(shape=(), trainable=False, dtype="int64")
        self.add_weight(shape=(2,))

    def call(self, x):
        return self.branches["right"][0](self.branches["left"](x)) * self.scales[0] + self._hidden


def subclassed():
    class Net(keras.Model):
        def __init__(self):
            super().__init__()
            self.block = Block()
            self.again = self.block
            self.tail = keras.Sequential([keras.layers.Dropout(0.1), keras.layers.Dense(2)])

        def call(self, x):
            return self.tail(self.block(x))

    model = Net()
    model(tf.zeros([1, 2]))
    return model


def functional():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.MultiHeadAttention(2, 2, dropout=0.1)(x[:, None], x[:, None])
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.LSTM(3)(x)))


OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(amsgrad=True, use_ema=True),
    "scaled": lambda: LossScaleOptimizer(keras.optimizers.Adam()),
    "nadam": keras.optimizers.Nadam,
    "adafactor": keras.optimizers.Adafactor,
    "rmsprop": lambda: keras.optimizers.RMSprop(centered=True, momentum=0.5),
    "muon": keras.optimizers.Muon,
    "ftrl": keras.optimizers.Ftrl,
}


@pytest.mark.parametrize(
    ("build", "optimizer"),
    mostly_extended(
        [(build, optimizer) for build in (subclassed, functional) for optimizer in OPTIMIZERS],
        lambda build, optimizer: (build is functional) == (optimizer in ("adam", "scaled", "muon")),
        why="each optimizer with one of the builds",
    ),
)
def test_a_second_instance_has_the_same_paths(build, optimizer):
    first, second = (TrainState(build(), OPTIMIZERS[optimizer](), 0) for _ in range(2))
    assert list(first.named_tensors()) == list(second.named_tensors())
    assert list(first.generators) == list(second.generators)
    assert [spec.global_shape for spec in first.specs()] == [spec.global_shape for spec in second.specs()]
    variables = [*first.model.weights, *first.optimizer.variables]
    assert [id(t.value) for t in first.named_tensors().values()] == [id(v.value) for v in variables]


def test_a_path_is_where_a_variable_sits():
    structure = structure_of(subclassed())
    assert sorted(structure.paths.values()) == [
        "again/branches/left/bias",
        "again/branches/left/kernel",
        "again/branches/right/0/bias",
        "again/branches/right/0/kernel",
        "again/count",
        "again/hidden",
        "again/scales/0",
        "again/scales/1",
        "again/variables/3",
        "tail/layers/0/seed_generator/state",
        "tail/layers/1/bias",
        "tail/layers/1/kernel",
    ]


def test_names_that_a_user_gave_make_no_difference():
    def build(name):
        return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name=name)])

    assert sorted(structure_of(build("head")).paths.values()) == sorted(structure_of(build(None)).paths.values())


def test_slots_are_named_by_role_and_by_the_variable_that_they_belong_to():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    state = TrainState(model, LossScaleOptimizer(keras.optimizers.Adam(use_ema=True)), 0)
    slots = [path.removeprefix("optimizer/") for path in state.named_tensors() if path.startswith("optimizer/")]
    roles = ("model_variables_moving_average", "momentums", "velocities")
    assert sorted(slots) == sorted(
        [
            *("iterations", "learning_rate", "step_counter", "dynamic_scale"),
            *("inner_optimizer/iterations", "inner_optimizer/learning_rate"),
            *(f"inner_optimizer/{role}/layers/0/{name}" for role in roles for name in ("kernel", "bias")),
        ]
    )


def test_slots_of_substitutes_are_named_by_the_originals():
    flat = [keras.Variable(np.zeros(6, "float32")), keras.Variable(np.zeros(2, "float32"))]
    optimizer = keras.optimizers.Muon()
    optimizer.build(flat)
    slots = slot_tensors(optimizer, flat, ["a/kernel", "a/bias"])
    assert slots["momentums/a/kernel"].variable.shape == [6]
    assert {path: slot.owner for path, slot in slots.items()} == {
        **{"iterations": None, "learning_rate": None, "momentums/a/kernel": 0, "momentums/a/bias": 1},
        **{path: place for place, path in enumerate(["adam_velocities/a/kernel", "adam_velocities/a/bias"])},
    }
    assert {path.rsplit("/", 2)[-1] for path in slots} == {"iterations", "learning_rate", "kernel", "bias"}


def test_slots_may_come_from_whoever_owns_them():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam()
    own = TrainState(model, keras.optimizers.SGD(), 0).named_tensors()
    state = TrainState(model, optimizer, 0, slots=lambda: {"optimizer/momentums/x": own["model/layers/0/kernel"]})
    assert not optimizer.built
    assert [path for path in state.named_tensors() if path.startswith("optimizer/")] == ["optimizer/momentums/x"]


# -- names of variables without a model --


def named(*names):
    return [tf.Variable(0.0, name=name) for name in names]


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (["dense/kernel", "dense_1/kernel"], ["dense_7/kernel", "dense_8/kernel"]),
        (["dense_9/kernel", "dense_10/kernel"], ["dense/kernel", "dense_1/kernel"]),
        (["net/dense_2/bias", "net/conv2d/bias"], ["net_4/dense_9/bias", "net_4/conv2d_3/bias"]),
        (["adam/dense_kernel_momentum", "adam/dense_1_kernel_momentum"],) * 2,
        (
            ["adam/dense_kernel_momentum", "adam/dense_1_kernel_momentum"],
            ["adam/dense_4_kernel_momentum", "adam/dense_5_kernel_momentum"],
        ),
    ],
)
def test_numbers_that_keras_gave_make_no_difference_between_ranks(here, there):
    assert unique_paths(named(*here)) == unique_paths(named(*there))
    assert len(set(unique_paths(named(*here)))) == len(here)
    # The order of the list may differ as well: names are what matches.
    assert unique_paths(named(*reversed(here))) == list(reversed(unique_paths(named(*there))))


def test_variables_of_one_name_and_tensors_are_told_apart():
    assert unique_paths([*named("a", "a", "b_1"), tf.constant(1.0)]) == ["a", "a#1", "b", "source3"]
