"""Wrapped optimizers of Keras 3 against those that were wrapped, in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain.horovod.keras as hvd

KINDS = sorted(
    (
        kind
        for kind in vars(keras.optimizers).values()
        if isinstance(kind, type) and issubclass(kind, keras.optimizers.Optimizer)
    ),
    key=lambda kind: kind.__name__,
)
AROUND_OTHERS = ("LossScaleOptimizer", "MultiOptimizer", "Optimizer")


@pytest.fixture(scope="module", autouse=True)
def _one_rank():
    hvd.init()
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


class Halving(keras.optimizers.schedules.LearningRateSchedule):
    """A schedule that is registered nowhere, and has no configuration."""

    def __call__(self, step):
        return 0.1 * 0.5 ** tf.cast(step, tf.float32)


class Signed(keras.optimizers.SGD):
    """An optimizer as scripts write them: with an argument and attributes that its configuration lacks."""

    def __init__(self, rate, scale):
        super().__init__(rate)
        self.scale = scale
        self.__calls = []

    def build(self, variables):
        if not self.built:
            super().build(variables)
            self.totals = [self.add_variable_from_reference(variable, "total") for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        self.__calls.append(variable.name)
        total = self.totals[self._get_variable_index(variable)]
        total.assign_add(gradient)
        variable.assign_sub(tf.cast(learning_rate, variable.dtype) * self.scale * tf.sign(total))

    @property
    def calls(self):
        return self.__calls


def scaled(rate):
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate), initial_scale=4.0)


def several():
    kinds = keras.optimizers
    return kinds.MultiOptimizer(kinds.OptimizerMap(kinds.Adam(Halving()), {"bias": undecayed(kinds.AdamW(0.1))}))


def trained(make, wrap, steps_before):
    """Return an optimizer, weights and state after four steps, the last of which are those of a wrapped optimizer."""
    starts = {"kernel": np.arange(1.0, 7.0).reshape(2, 3), "bias": np.ones(1)}
    variables = [keras.Variable(value, name=name) for name, value in starts.items()]
    optimizer = undecayed(make())
    for step in range(4):
        if step == steps_before:
            optimizer = wrap(optimizer)
        optimizer.apply([tf.fill([2, 3], tf.cast(step + 1, tf.float64)), tf.constant([2.0], tf.float64)], variables)
    return optimizer, [np.array(each) for each in [*variables, *optimizer.variables]]


def undecayed(optimizer):
    """Do what an optimizer keeps for itself, and its configuration does not."""
    if getattr(optimizer, "weight_decay", None):
        optimizer.exclude_from_weight_decay(var_names=["bias"])
    optimizer.note = "of a script"
    return optimizer


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize(
    "make",
    [
        *(
            pytest.param(lambda kind=kind: kind(0.1, weight_decay=0.5), id=kind.__name__)
            for kind in KINDS
            if kind.__name__ not in AROUND_OTHERS
        ),
        pytest.param(lambda: scaled(0.1), id="LossScaleOptimizer"),
        pytest.param(lambda: scaled(Halving()), id="schedule in a LossScaleOptimizer"),
        pytest.param(lambda: keras.optimizers.Adam(Halving()), id="schedule of a script"),
        pytest.param(
            several,
            id="MultiOptimizer",
            marks=pytest.mark.skipif(
                not hasattr(keras.optimizers, "MultiOptimizer"), reason="this Keras has no MultiOptimizer"
            ),
        ),
        pytest.param(lambda: Signed(0.1, scale=3.0), id="optimizer of a script"),
    ],
)
def test_a_wrapped_optimizer_is_the_given_one_that_reduces(make, steps_before):
    """In what comes out, but for the rounding of updates that are fused, and in all that a script asks it for."""
    wrapped, found = trained(make, hvd.DistributedOptimizer, steps_before)
    plain, expected = trained(make, lambda optimizer: optimizer, steps_before)
    for value, reference in zip(found, expected, strict=True):
        np.testing.assert_allclose(value, reference, rtol=0, atol=1e-9 * np.abs(reference).max())
    assert isinstance(wrapped, type(plain))
    assert (wrapped.note, getattr(wrapped, "calls", [])) == (plain.note, getattr(plain, "calls", []))


@pytest.mark.parametrize("wrap", [lambda each: each, keras.optimizers.LossScaleOptimizer])
def test_several_passes_are_one_step_of_the_optimizer(wrap):
    """Bias correction and schedules count steps; those of Horovod count passes."""

    def adam():
        return wrap(keras.optimizers.Adam(Halving()))

    found, expected = (keras.Variable([1.0, 2.0], dtype="float64") for _ in range(2))
    optimizer = hvd.DistributedOptimizer(adam(), backward_passes_per_step=2, average_aggregated_gradients=True)
    reference = adam()
    for step in range(3):
        for size in (step + 1.0, step + 2.0):
            optimizer.apply([tf.constant([size, -1.0], tf.float64)], [found])
        reference.apply([tf.constant([step + 1.5, -1.0], tf.float64)], [expected])
    assert int(optimizer.iterations) == int(reference.iterations) == 3
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_an_optimizer_of_a_script_is_saved_and_loaded_as_without_horovod(tmp_path):
    class Own(keras.optimizers.AdamW):
        """An optimizer with an argument of its own."""

        def __init__(self, rate=0.1, twist=1.0, **options):
            super().__init__(rate, **options)
            self.twist = twist

        def get_config(self):
            return {"twist": self.twist, "rate": float(self.learning_rate), "weight_decay": self.weight_decay}

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(Own(0.1, twist=7.0, weight_decay=0.5)), "mse", jit_compile=False)
    model.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", custom_objects={"Own": Own})
    again = hvd.load_model(tmp_path / "model.keras", custom_optimizers=[Own])
    assert type(loaded.optimizer) is Own
    for optimizer in (loaded.optimizer, again.optimizer):
        assert (optimizer.twist, int(optimizer.iterations)) == (7.0, 2)
        for value, kept in zip(optimizer.variables, model.optimizer.variables, strict=True):
            np.testing.assert_array_equal(value, kept)
