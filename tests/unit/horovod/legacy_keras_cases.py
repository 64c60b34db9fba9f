"""The face on tf_keras, in one process; `test_legacy.py` runs these with TF_USE_LEGACY_KERAS=1."""

import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.horovod as hvd
import hvdtrain.horovod.keras as hvd_keras
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.flavour import IS_LEGACY, optimizers

keras = tf.keras
legacy = keras.optimizers.legacy
scaling = keras.mixed_precision.LossScaleOptimizer

KINDS = [
    pytest.param(kind, id=f"{'legacy.' if module is legacy else ''}{name}")
    for module in (keras.optimizers, legacy)
    for name, kind in sorted(vars(module).items())
    if isinstance(kind, type) and issubclass(kind, optimizers.KINDS) and kind not in optimizers.KINDS
]


def stepped(optimizer, variable, **options):
    """Apply a gradient of ones, without an exchange."""
    optimizer.apply_gradients([(tf.ones(3), variable)], **options)
    return variable.numpy()


def test_keras_2_is_used():
    assert IS_LEGACY


def test_both_families_of_optimizers_are_there():
    assert len(KINDS) == 19


@pytest.mark.parametrize("kind", KINDS)
def test_a_wrapped_optimizer_is_the_given_one_that_reduces(kind):
    """Its next step is the next step of the one that was wrapped, and it is saved as that is."""
    skip = {"experimental_aggregate_gradients": False}
    plain, reference = (kind(learning_rate=0.1, clipnorm=0.5) for _ in range(2))
    variable, expected = (tf.Variable(tf.zeros(3)) for _ in range(2))
    stepped(plain, variable)
    stepped(reference, expected)
    plain.note = "of a script"
    wrapped = hvd_keras.DistributedOptimizer(plain)
    assert isinstance(wrapped, kind)
    assert wrapped.note == "of a script"
    assert keras.optimizers.serialize(wrapped) == keras.optimizers.serialize(plain)
    assert keras.saving.get_registered_name(type(wrapped)) == keras.saving.get_registered_name(kind)
    for values in (wrapped.variables, wrapped.variables()):
        assert [id(value) for value in values] == [id(value) for value in plain.variables()]
    before = variable.numpy()
    np.testing.assert_array_equal(stepped(wrapped, variable, **skip), stepped(reference, expected))
    assert not np.array_equal(variable.numpy(), before)
    assert int(wrapped.iterations) == int(plain.iterations) == 2


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, legacy.SGD])
def test_a_loss_scale_goes_along(kind):
    plain = scaling(kind(0.1, momentum=0.9), initial_scale=1024.0)
    variable = tf.Variable(tf.zeros(3))
    plain.apply_gradients([(tf.fill([3], np.inf), variable)])
    wrapped = hvd.DistributedOptimizer(plain)
    assert float(wrapped.loss_scale) == float(plain.loss_scale) == 512.0
    assert isinstance(wrapped, type(plain))
    assert keras.optimizers.serialize(wrapped) == keras.optimizers.serialize(plain)
    wrapped.apply_gradients([(tf.fill([3], np.inf), variable)], experimental_aggregate_gradients=False)
    assert (float(wrapped.loss_scale), float(plain.loss_scale)) == (256.0, 256.0)
    states = [float(value) for value in optimizers.state_of(wrapped) if value.shape.rank == 0]
    assert 256.0 in states, "the scale is not part of what is broadcast"


def test_schedules_and_registered_classes_are_kept(tmp_path):
    @keras.saving.register_keras_serializable("mine")
    class Own(keras.optimizers.SGD):
        """An optimizer that Keras does not know."""

    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(Own(schedule)), "mse")
    for name in ("model.keras", "model.h5"):
        model.save(tmp_path / name)
        loaded = keras.models.load_model(tmp_path / name)
        assert type(loaded.optimizer) is Own
        assert loaded.optimizer.get_config()["learning_rate"]["config"]["decay_steps"] == 10
        again = hvd_keras.load_model(str(tmp_path / name), custom_optimizers=[Own], legacy_opts=True)
        assert isinstance(again.optimizer, Own)
        assert isinstance(again.optimizer, optimizers.Distributed)


@pytest.mark.parametrize("kind", [keras.optimizers.SGD, legacy.SGD])
@pytest.mark.parametrize("wrap", [lambda optimizer: optimizer, scaling])
def test_checkpoints_of_tensorflow_hold_its_state(tmp_path, kind, wrap):
    skip = {"experimental_aggregate_gradients": False}
    plain = wrap(kind(0.1, momentum=0.9))
    variable = tf.Variable(tf.zeros(3))
    stepped(plain, variable)
    wrapped = hvd.DistributedOptimizer(plain)
    saved = tf.train.Checkpoint(variable=variable, optimizer=wrapped).save(tmp_path / "state")
    expected = stepped(wrapped, variable, **skip)
    fresh, again = tf.Variable(tf.zeros(3)), hvd.DistributedOptimizer(wrap(kind(0.1, momentum=0.9)))
    optimizers.built(again, [fresh])
    tf.train.Checkpoint(variable=fresh, optimizer=again).restore(saved).assert_consumed()
    assert int(again.iterations) == 1
    np.testing.assert_array_equal(stepped(again, fresh, **skip), expected)


def test_a_rate_that_is_a_schedule_cannot_be_set():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    callback = hvd_keras.callbacks.LearningRateScheduleCallback(0.1, 0.5)
    for kind, error, said in (
        (legacy.SGD, ConfigError, "is a schedule already"),
        (keras.optimizers.SGD, TypeError, "learning rate is not settable"),
    ):
        model.compile(kind(keras.optimizers.schedules.CosineDecay(0.1, 10)), "mse")
        with pytest.raises(error, match=said):
            model.fit(np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[callback])


@pytest.mark.parametrize("options", [{"renorm": True}, {"virtual_batch_size": 4}, {"synchronized": True}])
def test_other_batches_to_normalize_over_are_refused(options):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=f"Leave {name} out"):
        hvd.SyncBatchNormalization(**options)


def test_what_is_of_keras_3_is_refused():
    import keras as keras_3

    said = "is of Keras 3, but TF_USE_LEGACY_KERAS is set"
    model = keras_3.Sequential([keras_3.Input((1,)), keras_3.layers.Dense(1)])
    with pytest.raises(ConfigError, match=f"SGD {said}"):
        hvd.DistributedOptimizer(keras_3.optimizers.SGD())
    with pytest.raises(ConfigError, match=f"Dense {said}"):
        hvd.PartialDistributedGradientTape(tf.GradientTape(), local_layers=model.layers)
    with pytest.raises(ConfigError, match=f"Sequential {said}"):
        hvd_keras.elastic.KerasState(model, keras.optimizers.SGD())
    for callback in (hvd_keras.callbacks.MetricAverageCallback(), hvd_keras.callbacks.BestModelCheckpoint()):
        with pytest.raises(ConfigError, match=f"Sequential {said}"):
            callback.set_model(model)
