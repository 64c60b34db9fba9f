"""What hvdtrain takes for granted about Keras' variables and optimizers."""

from unittest import mock

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.compat import keras_variables as compat
from hvdtrain.compat.seams import RATE
from hvdtrain.config.errors import CompatibilityError, ConfigError
from tests.unit.compat.contracts import Contracts

CONTRACTS = Contracts(compat, "keras")
VARIABLE, OPTIMIZER = keras.Variable, keras.optimizers.Optimizer


def variable(value=(1.0, 2.0), **options):
    return keras.Variable(np.array(value, np.float32), **options)


def built(kind=keras.optimizers.Adam, **options):
    optimizer, trained = kind(**options), variable(name="w")
    optimizer.build([trained])
    return optimizer, trained


@CONTRACTS.of(compat.declared_dtype)
def keeps_its_dtype():
    with keras.src.backend.AutocastScope("bfloat16"):
        mine = variable(dtype="float32")
        assert mine.dtype == "bfloat16"
        assert compat.declared_dtype(mine) == "float32"


@CONTRACTS.of(compat.tensor_of)
def holds_a_tensor():
    mine = variable()
    assert isinstance(compat.tensor_of(mine), tf.Variable)
    assert compat.tensor_of(mine) is mine.value
    assert compat.tensor_of(compat.tensor_of(mine)) is mine.value


@CONTRACTS.of(compat.on_their_devices)
def is_initialized_where_it_was_created():
    class There(keras.layers.Dense):
        def build(self, shape):
            with tf.device("CPU:0"):
                super().build(shape)

    layer, entered, device = There(2), [], tf.device
    with compat.on_their_devices(), mock.patch.object(tf, "device", lambda name: entered.append(name) or device(name)):
        keras.src.backend.compute_output_spec(layer, keras.KerasTensor((None, 3)))
    assert entered.count("/device:CPU:0") == 2, "of kernel and bias, once shapes are known"
    assert layer.kernel.shape == (3, 2)
    assert "_deferred_initialize" not in vars(layer.kernel)


@CONTRACTS.of(compat.autocast)
def casts():
    mine = variable()
    assert compat.autocast(mine, tf.ones([2])).dtype == tf.float32
    with keras.src.backend.AutocastScope("bfloat16"):
        assert compat.autocast(mine, tf.ones([2])).dtype == tf.bfloat16


@CONTRACTS.of(compat.hold, compat.declare_shape, compat.rename)
def is_another_one():
    mine = variable()
    compat.rename(mine, "other/path")
    compat.declare_shape(mine, (3, 4))
    assert (mine.path, mine.shape) == ("other/path", (3, 4))
    compat.hold(mine, tf.Variable([7.0]))
    assert mine.shape == (1,)
    assert mine.numpy().tolist() == [7.0]
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    compat.hold(layer.kernel, None)
    assert compat.tensor_of(layer.kernel) is None
    assert keras.src.backend.compute_output_spec(layer.call, keras.KerasTensor((None, 2))).shape == (None, 3)
    with pytest.raises(ConfigError, match=r"Another rank has the value of 'dense.*kernel'"):
        layer(tf.ones([1, 2]))


@CONTRACTS.of(compat.reading_rows)
def is_read_by_rows():
    """By what an embedding calls, with the values, dtypes and gradients that Keras has."""
    table = variable(np.arange(12.0).reshape(4, 3))

    def looked_up(rows):
        with tf.GradientTape() as tape:
            found = keras.ops.take(table, rows, axis=0)
            square = tf.cast(getattr(found, "flat_values", found), tf.float32) ** 2
        return found, tape.gradient(square, compat.tensor_of(table))

    for dtype in (None, "float16"):
        for rows in (tf.constant([[1, 3], [-1, 1]]), tf.ragged.constant([[1], [3, -1]])):
            with keras.src.backend.AutocastScope(dtype):
                expected, slope = looked_up(rows)
                with compat.reading_rows():
                    function = tf.function(looked_up, autograph=False).get_concrete_function(rows)
                found, by_rows = function(rows)
            kinds = [op.type for op in function.graph.get_operations()]
            ragged = isinstance(rows, tf.RaggedTensor)  # tf.nn.embedding_lookup makes a tensor of the whole first
            assert ("ResourceGather" in kinds) != ragged
            assert ("GatherV2" in kinds) == ragged
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(*(keras.ops.convert_to_numpy(each) for each in (found, expected)))
            np.testing.assert_array_equal(tf.convert_to_tensor(by_rows), tf.convert_to_tensor(slope))
    with compat.reading_rows():
        assert keras.ops.take(table, tf.constant([2], tf.int16), axis=0).numpy().tolist() == [[6, 7, 8]]
        found = keras.ops.vectorized_map(lambda row: keras.ops.take(table, row, axis=0), tf.constant([[2], [0]]))
        assert found.numpy().tolist() == [[[6, 7, 8]], [[0, 1, 2]]]
        with keras.StatelessScope(state_mapping=[(table, tf.ones([4, 3]))]):
            assert keras.ops.take(table, [2], axis=0).numpy().tolist() == [[1, 1, 1]]
        compat.set_state(table, Five())
        assert keras.ops.take(table, [2], axis=0).numpy().tolist() == [[5, 5, 5]]
        compat.set_state(table, None)
    assert not hasattr(table, "sparse_read"), "Keras reads rows by itself: leave it to Keras"


class Five(compat.VariableState):
    def read(self, variable):
        return tf.fill(variable.shape, 5.0)


@CONTRACTS.of(compat.replace_regularizer)
def has_another_penalty():
    layer = keras.layers.Dense(1, kernel_regularizer="l2")
    layer.build((1, 2))
    compat.replace_regularizer(layer.kernel, lambda value: tf.constant(5.0))
    assert [float(loss) for loss in layer.losses] == [5.0]


@CONTRACTS.of(compat.when_initialized)
def tells_when_it_is_initialized():
    told = []
    with keras.StatelessScope():
        mine = keras.Variable(keras.initializers.Ones(), shape=(2,))
        assert compat.when_initialized(mine, told.append)
        assert not told
    assert mine.numpy().tolist() == [1.0, 1.0]
    assert told == [compat.tensor_of(mine)]
    assert not compat.when_initialized(mine, told.append)


@CONTRACTS.of(compat.making_variables)
def makes_variables():
    seen = []

    def make(owner, initializer, create):
        seen.append((owner.path, tuple(owner.shape), type(initializer).__name__))
        return create(initial_value=tf.fill(owner.shape, 3.0))

    with compat.making_variables(make):
        layer = keras.layers.Dense(2, name="dense")
        layer.build((1, 3))
    assert seen == [("dense/kernel", (3, 2), "GlorotUniform"), ("dense/bias", (2,), "Zeros")]
    assert layer.kernel.numpy().tolist() == [[3.0, 3.0]] * 3


@CONTRACTS.of(compat.VariableState, compat.state_of, compat.set_state)
def reads_and_writes_by_its_state():
    written = []

    class Sevens(compat.VariableState):
        def read(self, variable):
            return tf.fill(variable.shape, 7.0)

        def write(self, variable, value):
            written.append(value)

    mine, state = variable(), Sevens()
    kind, before = type(mine), mine.numpy().tolist()
    compat.set_state(mine, state)
    compat.set_state(mine, state)
    assert compat.state_of(mine) is state
    assert isinstance(mine, kind)
    assert mine.numpy().tolist() == np.asarray(mine).tolist() == [7.0, 7.0]
    assert float(keras.ops.sum(mine * 1.0)) == 14.0
    mine.assign([1.0, 2.0])
    mine.assign_add([1.0, 1.0])
    state.reinitialize(mine, keras.initializers.Ones())
    assert [each.numpy().tolist() for each in written] == [[1.0, 2.0], [8.0, 8.0], [1.0, 1.0]]
    compat.set_state(mine, None)
    assert type(mine) is kind
    assert mine.numpy().tolist() == before
    assert compat.state_of(mine) is None


@CONTRACTS.of(compat.assign_to_tensor)
def assigns_to_its_tensor():
    mine = variable()
    compat.assign_to_tensor(mine, [5.0, 6.0])
    assert mine.numpy().tolist() == [5.0, 6.0]


@CONTRACTS.of(compat.is_stateless)
def knows_stateless_scopes():
    assert not compat.is_stateless()
    with keras.StatelessScope():
        assert compat.is_stateless()


@CONTRACTS.of(compat.is_inferring_shapes)
def knows_when_shapes_are_found():
    seen = []

    class Noting(keras.layers.Layer):
        def call(self, x):
            seen.append(compat.is_inferring_shapes())
            return x

    layer = Noting()
    layer(keras.Input((2,)))
    layer(tf.ones([1, 2]))
    tf.function(layer)(tf.ones([1, 2]))
    assert seen == [True, False, False]


@CONTRACTS.of(compat.disable_gradient_sums)
def sums_no_gradients():
    """What is put in the place of the sums is what is applied."""
    optimizer, mine = built(keras.optimizers.SGD, learning_rate=1.0)
    compat.disable_gradient_sums(optimizer)
    optimizer.apply([tf.ones([2])], [mine])
    assert mine.numpy().tolist() == [0.0, 1.0]
    vars(optimizer)["_all_reduce_sum_gradients"] = lambda pairs: [(gradient * 2, one) for gradient, one in pairs]
    optimizer.apply([tf.ones([2])], [mine])
    assert mine.numpy().tolist() == [-2.0, -1.0]


@CONTRACTS.of(compat.trained_variables)
def knows_what_it_trains():
    optimizer, mine = built()
    assert compat.trained_variables(optimizer) == [mine]
    assert compat.trained_variables(keras.optimizers.SGD()) == []


@CONTRACTS.of(compat.step_counter)
def counts_steps():
    optimizer, mine = built(gradient_accumulation_steps=2)
    optimizer.apply([tf.ones([2])], [mine])
    assert int(compat.step_counter(optimizer).numpy()) == 1
    assert int(optimizer.iterations) == 0


@CONTRACTS.of(compat.rate_or_schedule)
def has_a_rate():
    schedule = keras.optimizers.schedules.CosineDecay(1.0, 10)
    assert compat.rate_or_schedule(keras.optimizers.SGD(schedule)) is schedule
    assert float(compat.rate_or_schedule(keras.optimizers.SGD(0.5)).numpy()) == 0.5


@CONTRACTS.of(compat.rate_after_update)
def knows_the_next_rate():
    optimizer, mine = built(
        keras.optimizers.SGD, learning_rate=keras.optimizers.schedules.ExponentialDecay(1.0, 1, 0.5)
    )
    found = compat.rate_after_update(optimizer, RATE.active(optimizer))
    assert float(optimizer.learning_rate) == 1.0
    optimizer.apply([tf.ones([2])], [mine])
    assert float(found) == float(optimizer.learning_rate) == 0.5


@CONTRACTS.of(compat.slot_of)
def finds_slots():
    optimizer, mine = built(keras.optimizers.SGD, momentum=0.9)
    assert compat.slot_of(optimizer, optimizer.momentums, mine) is optimizer.momentums[0]
    assert compat.slot_of(optimizer, ["slot"], mine.value) == "slot"


@CONTRACTS.of(compat.adam_slots)
def has_adams_slots():
    optimizer, mine = built()
    optimizer.apply([tf.constant([1.0, 2.0])], [mine])
    first, second = compat.adam_slots(optimizer, mine)
    np.testing.assert_allclose(first.numpy(), [0.1, 0.2], rtol=1e-5)
    np.testing.assert_allclose(second.numpy(), [0.001, 0.004], rtol=1e-4)


@CONTRACTS.of(compat.average_of)
def keeps_averages():
    optimizer, mine = built(keras.optimizers.SGD, use_ema=True, learning_rate=1.0)
    optimizer.apply([tf.constant([1.0, 1.0])], [mine])
    np.testing.assert_allclose(compat.average_of(optimizer, mine).numpy(), mine.numpy(), rtol=1e-6)


@CONTRACTS.of(compat.is_decayed)
def decays_by_name():
    optimizer = keras.optimizers.AdamW(weight_decay=0.1)
    kept, excluded = variable(name="w"), variable(name="bias")
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.build([kept, excluded])
    assert compat.is_decayed(optimizer, kept)
    assert not compat.is_decayed(optimizer, excluded)


@CONTRACTS.of(compat.set_decayed)
def decays_as_told():
    optimizer, mine = built(keras.optimizers.SGD, weight_decay=0.5, learning_rate=1.0)
    compat.set_decayed(optimizer, mine, False)
    optimizer.apply([tf.zeros([2])], [mine])
    assert mine.numpy().tolist() == [1.0, 2.0]


@CONTRACTS.of(compat.updating_at)
def updates_by_another_count_and_rate():
    optimizer, trained = built(keras.optimizers.Adam, learning_rate=0.5, use_ema=True, ema_momentum=0.5)
    count = keras.Variable(0, dtype="int64")
    with compat.updating_at(optimizer, count, tf.constant(0.25), updates_per_step=2):
        assert optimizer.ema_momentum == 0.5**0.5
        for _ in range(2):
            optimizer.apply([tf.constant([1.0, -1.0])], [trained])
    assert (int(count), int(optimizer.iterations)) == (2, 0)
    np.testing.assert_allclose(trained, [0.5, 2.5], rtol=1e-4)  # Adam's first steps are as long as the rate
    assert float(optimizer.learning_rate) == 0.5
    assert optimizer.ema_momentum == 0.5


@CONTRACTS.of(compat.OptimizerWithOwnDecay)
def decays_by_itself():
    class Still(compat.OptimizerWithOwnDecay):
        def update_step(self, gradient, variable, learning_rate):
            pass

    optimizer, mine = built(Still, learning_rate=1.0, weight_decay=0.5)
    optimizer.apply([tf.ones([2])], [mine])
    assert mine.numpy().tolist() == [1.0, 2.0]


@CONTRACTS.of(compat.forget_slots)
def forgets_its_slots():
    optimizer, mine = built()
    compat.forget_slots(optimizer)
    assert not optimizer.built
    assert len(optimizer.variables) == 2
    optimizer.build([mine, variable(name="v")])
    assert len(optimizer.variables) == 6 == len(keras_store(optimizer))


@CONTRACTS.of(compat.track_variables)
def tracks_what_its_list_holds():
    optimizer, _ = built()
    optimizer._variables = optimizer._variables[:3]
    compat.track_variables(optimizer)
    assert len(keras_store(optimizer)) == 3


def keras_store(optimizer):
    store = {}
    optimizer.save_own_variables(store)
    return store


@CONTRACTS.of(compat.momentum_slots)
def has_velocities():
    optimizer, mine = built(keras.optimizers.SGD, momentum=0.5)
    assert [each.shape for each in compat.momentum_slots(optimizer)] == [mine.shape]
    assert compat.momentum_slots(built(keras.optimizers.Adagrad)[0]) is None


@CONTRACTS.of(compat.load_optimizer_weights)
def loads_old_files():
    with h5py.File("memory.h5", "w", driver="core", backing_store=False) as file:
        group = file.create_group("optimizer_weights")
        group.attrs["weight_names"] = [b"iteration"]
        group["iteration"] = np.array(3)
        assert [int(np.array(each)) for each in compat.load_optimizer_weights(file)] == [3]


test_contract, test_every_function_has_a_contract = CONTRACTS.tests()


def test_bookkeeping_lists_what_other_attributes_hold():
    assert set(vars(built()[0])) >= compat.OPTIMIZER_BOOKKEEPING


def test_gradients_that_are_summed_elsewhere_are_refused(monkeypatch):
    """Each replica's gradient would count once for each of them."""
    monkeypatch.setattr(keras.optimizers.SGD, "_backend_update_step", lambda *arguments: None)
    compat.disable_gradient_sums(keras.optimizers.SGD())
    for kind in keras.optimizers.SGD.__mro__:
        if "_backend_update_step" in vars(kind) and kind is not keras.optimizers.SGD:
            monkeypatch.setattr(kind, "_backend_update_step", lambda *arguments: None)
    with pytest.raises(CompatibilityError, match="SGD sums gradients in _all_reduce_sum_gradients alone"):
        compat.disable_gradient_sums(keras.optimizers.SGD())


def test_variables_that_are_made_in_another_way_are_refused(monkeypatch):
    """All of them would be whole in memory on each rank."""

    def initialize(self, initializer):
        self._initialize(initializer(self._shape, dtype=self._dtype))

    monkeypatch.setattr(keras.Variable, "_initialize_with_initializer", initialize)
    with (
        pytest.raises(CompatibilityError, match=rf"making_variables relies on it. Received: keras {keras.__version__}"),
        compat.making_variables(lambda owner, initializer, create: create()),
    ):
        raise AssertionError("never entered")


def test_a_decay_that_is_decided_elsewhere_is_refused(monkeypatch):
    optimizer, mine = built(keras.optimizers.SGD, weight_decay=0.5)
    monkeypatch.setattr(
        OPTIMIZER,
        "_use_weight_decay",
        lambda self, variable: vars(self).setdefault("_exclude_from_weight_decay_cache", {}) is not None,
    )
    with pytest.raises(CompatibilityError, match="set_decayed relies on it"):
        compat.set_decayed(optimizer, mine, False)


def test_weights_that_would_decay_twice_are_refused(monkeypatch):
    monkeypatch.setattr(compat, "uses_attribute", lambda kind, name: False)
    with pytest.raises(CompatibilityError, match="decays weights by _apply_weight_decay"):
        compat.OptimizerWithOwnDecay(0.1).build([variable()])
