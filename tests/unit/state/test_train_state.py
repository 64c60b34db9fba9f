import hashlib
import json
import zlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import DesyncError
from hvdtrain.runtime.placement import draw_for_samples
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import path_of, unwrap


class Net(keras.Model):
    """Two dropouts, one of them deep inside, and BatchNorm."""

    def __init__(self):
        super().__init__(name="net")
        self.first = keras.layers.Dense(3, name="first")
        self.norm = keras.layers.BatchNormalization(name="norm")
        self.inner = keras.Sequential(
            [keras.layers.Dropout(0.5, name="deep"), keras.layers.Dense(2, name="last")], name="in"
        )
        self.dropout = keras.layers.Dropout(0.5, name="top")

    def call(self, x, training=False):
        return self.inner(
            self.dropout(self.norm(self.first(x), training=training), training=training), training=training
        )


def state_of(model=None, optimizer="adam", seed=0):
    model = model or Net()
    model(tf.zeros([1, 4]))
    return TrainState(model, keras.optimizers.get(optimizer), seed)


# -- paths --


def test_variables_are_known_by_path_on_both_sides_of_the_door():
    plain, kept = tf.Variable(1.0, name="a/plain"), keras.Variable(2.0, name="kept")
    assert (path_of(plain), path_of(kept)) == ("a/plain", kept.path)
    assert unwrap(plain) is plain
    assert unwrap(kept) is kept.value


# -- the state --


def test_parameters_are_counted_with_the_statistics():
    assert state_of().parameters() == (4 * 3 + 3) + 4 * 3 + (3 * 2 + 2)


# -- the hash --


def flat(values, dtype="float32"):
    """The state of a model that is nothing but one weight."""

    class One(keras.Model):
        def __init__(self):
            super().__init__(name="one")
            self.w = self.add_weight(shape=np.shape(values), dtype=dtype, name="w", initializer="zeros")

        def call(self, x):
            return x

    model = One()
    model.w.assign(values)
    return TrainState(model, keras.optimizers.SGD(), 0)


def test_the_hash_is_that_of_path_dtype_shape_and_bytes():
    state = flat([1.0, 2.0])
    expected = hashlib.sha256(b"model/w:float32:(2,)" + np.array([1, 2], "float32").tobytes()).hexdigest()
    assert state.parameter_hash() == expected


def test_every_byte_of_every_weight_counts():
    state = state_of()
    seen = {state.parameter_hash()}
    for weight in state.model.weights:
        value = weight.numpy()
        for place in (0, -1):
            changed = value.copy()
            changed.reshape(-1)[place] = np.nextafter(changed.reshape(-1)[place], np.float32(9))
            weight.assign(changed)
            seen.add(state.parameter_hash())
        weight.assign(value)
    assert len(seen) == 1 + 2 * len(state.model.weights)
    assert state.parameter_hash() in seen


def test_shape_dtype_sign_and_order_count():
    states = [
        flat([[1.0, 2.0]]),
        flat([[1.0], [2.0]]),
        flat([1.0, 2.0]),
        flat([2.0, 1.0]),
        flat([1.0, 2.0], "float64"),
        flat([0.0]),
        flat([-0.0]),
        flat([0.0], "bfloat16"),
        flat([0.0], "float16"),
    ]
    assert len({state.parameter_hash() for state in states}) == len(states)


def test_the_optimizer_and_the_draws_do_not_count():
    state = state_of()
    before = state.parameter_hash()
    for variable in (
        *state.generators.values(),
        *[t.value for p, t in state.named_tensors().items() if p.startswith("optimizer/")],
    ):
        variable.assign(variable + tf.cast(1, variable.dtype))
    assert state.parameter_hash() == before


class Answering(SingleBackend):
    def __init__(self, answers):
        self.answers = answers

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [payload if answer is None else answer for answer in self.answers]


def test_a_hash_that_all_ranks_have_is_agreed():
    state = state_of()
    assert state.agreed_hash(Answering([None] * 3)) == state.parameter_hash()


def test_ranks_that_drifted_are_named():
    state = state_of()
    with pytest.raises(DesyncError, match=r"rank 2 differ from those of rank 0.*2 of 4 ranks differ"):
        state.agreed_hash(Answering([None, None, json.dumps("x" * 64), json.dumps("y" * 64)]))


# -- statistics --


class OfTwo(SingleBackend):
    """Two replicas; the other one holds three times what this one has."""

    size = 2

    def __init__(self):
        self.asked = []

    def all_reduce(self, tensor, *, name, op="sum", prescale=1.0, postscale=1.0):
        assert op == "average"
        self.asked.append((name, tensor.dtype))
        return tensor * 2


def test_moving_statistics_are_averaged_and_nothing_else_is_touched():
    state = state_of()
    state.model.norm.moving_mean.assign([1.0, 2.0, 3.0])
    before = {path: tensor.value.numpy() for path, tensor in state.named_tensors().items()}
    seeds = {path: variable.numpy() for path, variable in state.generators.items()}
    backend = OfTwo()
    state.average_statistics(backend)
    changed = {p for p, tensor in state.named_tensors().items() if (tensor.value.numpy() != before[p]).any()}
    assert {path.rsplit("/", 1)[1] for path in changed} == {"moving_mean", "moving_variance"}
    np.testing.assert_allclose(state.model.norm.moving_mean, [2, 4, 6])
    assert all((variable.numpy() == seeds[path]).all() for path, variable in state.generators.items())
    assert {dtype for _, dtype in backend.asked} == {tf.float64}
    assert len({name for name, _ in backend.asked}) == 2


def test_frozen_weights_are_no_statistics():
    state = state_of()
    state.model.first.trainable = False
    state.model.norm.trainable = False
    backend = OfTwo()
    state.average_statistics(backend)
    assert {name.rsplit("/", 1)[1] for name, _ in backend.asked} == {"moving_mean", "moving_variance"}


# -- randomness --


def drawn(state, seed=0, replica=0, step=0):
    state.scalars.seed = seed
    state.counter.assign(step)
    state.seed_generators(replica)
    return [tuple(variable.numpy().tolist()) for variable in state.generators.values()]


def test_draws_are_a_function_of_seed_step_and_replica():
    state = state_of()
    states = [drawn(state, *case) for case in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 10**6))]
    assert drawn(state, 0, 1, 0) == states[2]
    each = [pair for layers in states for pair in layers]
    assert len(set(each)) == len(each)  # the two layers differ as well


def test_replicas_that_share_their_samples_draw_for_these_alike():
    state = state_of()
    whole, sliced = state.generators.values()
    draw_for_samples(whole)
    seen = []
    for replica, samples in ((0, 0), (1, 0), (2, 1)):
        state.seed_generators(replica, samples)
        seen.append((tuple(whole.numpy()), tuple(sliced.numpy())))
        state.counter.assign(0)
    assert seen[0][0] == seen[1][0] != seen[2][0]
    assert len({draws for _, draws in seen}) == 3


def test_the_draws_are_those_of_earlier_versions():
    """So that a run that is resumed goes on with the numbers that it would have had."""
    state = state_of()
    assert drawn(state, seed=3, replica=1, step=7) == [(KEYS[0], 7 * 4096), (KEYS[1], 7 * 4096)]


KEYS = [zlib.crc32(b"3/1/0"), zlib.crc32(b"3/1/1")]


def test_no_draw_comes_again_when_the_counter_is_full():
    """Its 32 bits are 2^20 steps of 4096 draws."""
    state = state_of()
    steps = [0, 1, 2**20 - 1, 2**20, 2**20 + 1, 2**21, 5 * 2**20, 2**40]
    each = [pair for step in steps for pair in drawn(state, step=step)]
    assert len(set(each)) == len(each)
