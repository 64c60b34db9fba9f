"""`train_on_batch`, `test_on_batch` and `predict_on_batch`, as Keras has them."""

import keras
import numpy as np
import pytest

import hvdtrain

pytestmark = pytest.mark.usefixtures("session")
X = np.random.default_rng(0).standard_normal((10, 4)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def compiled():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, metrics=["accuracy"])
    return model


@pytest.mark.parametrize(
    "weights",
    [
        pytest.param({}, marks=pytest.mark.extended),
        pytest.param({"sample_weight": np.arange(10.0)}, marks=pytest.mark.extended),
        {"class_weight": {0: 1.0, 1: 3.0}},
    ],
)
def test_batches_by_themselves_are_those_of_keras(weights):
    theirs, ours = compiled(), compiled()
    trainer = hvdtrain.Trainer(ours)
    for _ in range(3):
        theirs.reset_metrics()  # Keras 3.15 does by itself
        expected = theirs.train_on_batch(X, Y, **weights)
        np.testing.assert_allclose(trainer.train_on_batch(X, Y, **weights), expected, rtol=1e-5)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    theirs.reset_metrics()
    np.testing.assert_allclose(trainer.test_on_batch(X, Y), theirs.test_on_batch(X, Y), rtol=1e-5)
    np.testing.assert_allclose(trainer.predict_on_batch(X), theirs.predict_on_batch(X), rtol=1e-5, atol=1e-6)
    assert sorted(trainer.train_on_batch(X, Y, return_dict=True)) == ["accuracy", "loss"]
    assert sorted(trainer.test_on_batch(X, Y, return_dict=True)) == ["accuracy", "loss"]
    assert trainer.state.scalars.step == 4


def test_a_fit_goes_on_from_there():
    trainer = hvdtrain.Trainer(compiled())
    trainer.train_on_batch(X, Y)
    result = trainer.fit(X, Y, batch=5, epochs=2, verbose=0)
    assert result.steps == 5
    assert int(trainer.optimizer.iterations) == 5
