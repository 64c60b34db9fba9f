"""What layers hold beside their variables: compared, shared, saved and copied."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.layer_states import layers_with_states, share_states
from hvdtrain.state.variables import unwrap, warning_of_adapted
from tests.unit.gathering import on_ranks

X = np.random.default_rng(0).standard_normal((16, 4)).astype("float32")
Y = X.sum(1)
pytestmark = pytest.mark.usefixtures("session")
WORDS = np.array(["a", "b", "c", "a"] * 4)


class Scale(keras.layers.Layer):
    """Keeps a number in Python, and says so in what it saves."""

    factor = 1.0

    def build(self, input_shape):
        self.kernel = self.add_weight(shape=(), initializer="ones")

    def call(self, inputs):
        return inputs * self.kernel * self.factor

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["factor"] = np.float64(self.factor)

    def load_own_variables(self, store):
        self.factor = float(store["factor"][()])
        self.kernel.assign(store["0"])


def normalizing(*, adapted):
    layer = keras.layers.Normalization()
    if adapted:
        layer.adapt(10 * X + 3)
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.BatchNormalization()(layer(inputs))))


def looking_up(words, *, given=False):
    lookup = keras.layers.StringLookup(vocabulary=list(words) if given else None)
    if not given:
        lookup.adapt(words)
    inputs = keras.Input((), dtype="string")
    return keras.Model(inputs, keras.layers.Embedding(8, 1)(lookup(inputs)))


def scaled(factor):
    inputs = keras.Input((4,))
    layer = Scale()
    model = keras.Model(inputs, layer(inputs))
    layer.factor = factor
    return model


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (lambda rank: looking_up(WORDS if rank == 0 else WORDS[::-1].copy()[:3]), tf.constant(WORDS)),
        (lambda rank: scaled(2.0 + rank), X),
    ],
)
def test_every_rank_gets_the_states_of_the_first(build, data):
    models = [build(0), build(1)]
    assert list(layers_with_states(models[0]))
    models[1].set_weights(models[0].get_weights())
    before = [model(data).numpy() for model in models]
    assert np.abs(before[0] - before[1]).max() > 0
    on_ranks(2, lambda backend: share_states(models[backend.index], backend, 0))
    after = [model(data).numpy() for model in models]
    np.testing.assert_array_equal(after[0], before[0])
    np.testing.assert_array_equal(after[1], before[0])


def normalizing_alone(rank):
    layer = keras.layers.Normalization(name="norm")
    layer.adapt((10 + rank) * X + 3)
    return keras.Sequential([keras.Input((4,)), layer])


def test_functions_that_were_traced_before_compute_with_what_is_shared():
    models = [normalizing_alone(rank) for rank in range(2)]
    expected = models[0].predict(X, verbose=0)
    assert np.abs(models[1].predict(X, verbose=0) - expected).max() > 0
    on_ranks(2, lambda backend: share_states(models[backend.index], backend, 0))
    np.testing.assert_array_equal(models[1].predict(X, verbose=0), expected)


def test_layers_with_variables_apart_keep_their_state():
    models = [normalizing_alone(rank) for rank in range(2)]
    before = models[1].predict(X, verbose=0)
    apart = {id(unwrap(variable)) for model in models for variable in model.variables}
    on_ranks(2, lambda backend: share_states(models[backend.index], backend, 0, apart))
    np.testing.assert_array_equal(models[1].predict(X, verbose=0), before)


def test_adapted_variables_that_are_replaced_without_their_layer_are_warned_of():
    mine, theirs = (normalizing_alone(rank) for rank in range(2))
    with (
        pytest.warns(UserWarning, match=r"^norm: .* Pass the model\.$"),
        warning_of_adapted(mine.variables, "Pass the model."),
    ):
        mine.set_weights(theirs.get_weights())
    with warnings.catch_warnings(), warning_of_adapted([*mine.variables, keras.Variable(0, name="count")], ""):
        warnings.simplefilter("error")
        mine.set_weights(theirs.get_weights())


def test_vocabularies_that_were_given_and_differ_are_refused():
    models = [looking_up(words, given=True) for words in (["a", "b"], ["a", "c"])]
    for found in on_ranks(2, lambda backend: share_states(models[backend.index], backend, 0)):
        assert isinstance(found, ConfigError)
        assert "StringLookup" in str(found)
        assert "of rank 1 was made with other arguments than that of rank 0" in str(found)


def test_ordinary_layers_have_none():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2), keras.layers.BatchNormalization()])
    assert not layers_with_states(model)


@pytest.mark.parametrize(
    ("build", "other", "data"),
    [
        (lambda: normalizing(adapted=True), lambda: normalizing(adapted=False), X),
        (lambda: looking_up(WORDS), lambda: looking_up(["x", "y", "z"]), tf.constant(WORDS)),
        (lambda: scaled(3.0), lambda: scaled(1.0), X),
    ],
)
def test_what_is_saved_is_restored(tmp_path, build, other, data):
    saved = hvdtrain.Trainer(build(), "sgd", "mse")
    targets = np.zeros(saved.model.output_shape[1:], "float32") + Y.reshape(
        -1, *[1] * (len(saved.model.output_shape) - 1)
    )
    dataset = tf.data.Dataset.from_tensor_slices((data, targets)).batch(8)
    saved.fit(dataset, epochs=1, checkpoint=tmp_path, verbose=0)
    expected = saved.model.predict(data, verbose=0)
    restored = hvdtrain.Trainer(other(), "sgd", "mse")
    restored.restore(tmp_path)
    np.testing.assert_array_equal(restored.model.predict(data, verbose=0), expected)


def test_a_model_with_synchronized_normalization_keeps_what_was_adapted():
    model = normalizing(adapted=True)
    trainer = hvdtrain.Trainer(model, "sgd", "mse", sync_batch_norm=True)
    np.testing.assert_allclose(trainer.model.predict(X, verbose=0), model.predict(X, verbose=0), rtol=1e-6)


def test_a_copy_that_lacks_a_setting_is_refused():
    class Forgetful(keras.layers.Layer):
        def __init__(self, factor=1.0, **options):
            super().__init__(**options)
            self.factor = factor

        def call(self, inputs):
            return inputs * self.factor

        def get_config(self):
            return {"name": self.name}

    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.BatchNormalization()(Forgetful(3.0)(inputs)))
    with pytest.raises(ConfigError, match=r"whose get_config\(\) leaves out factor"):
        hvdtrain.Trainer(model, "sgd", "mse", sync_batch_norm=True)
