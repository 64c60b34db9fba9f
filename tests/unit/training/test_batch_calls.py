"""`train_on_batch`, `test_on_batch` and `predict_on_batch`, as Keras has them."""

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError, NonFiniteError
from hvdtrain.config.facts import Facts

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


def test_bad_batches_are_errors_or_skipped_as_in_a_fit(caplog):
    bad = np.where(np.arange(10)[:, None] == 3, np.nan, X)
    with pytest.raises(NonFiniteError, match=r"The data hold NaN or infinite values at step 1\."):
        hvdtrain.Trainer(compiled()).train_on_batch(bad, Y)
    trainer = hvdtrain.Trainer(compiled(), on_bad_step="skip", max_bad_steps=2)
    trainer.train_on_batch(X, Y)
    before = trainer.model.get_weights()
    with caplog.at_level("INFO", logger="hvdtrain"):
        for _ in range(2):
            assert np.isnan(trainer.train_on_batch(bad, Y)).all(), "figures of a step that was not taken"
    assert "warning: step 2 is skipped: NaN or infinite values in the data." in caplog.text
    np.testing.assert_array_equal(np.concatenate(trainer.model.get_weights(), None), np.concatenate(before, None))
    with pytest.raises(NonFiniteError, match=r"3 steps in a row were bad .*max_bad_steps=2"):
        trainer.train_on_batch(bad, Y)


@pytest.mark.parametrize("option", [{"on_bad_step": "rollback"}, {"update": "async", "record": "order.json"}])
def test_options_that_need_a_fit_are_refused(option, monkeypatch):
    monkeypatch.setattr("hvdtrain.training.core.TrainerCore._job", lambda trainer: Facts())  # it needs ranks over MPI
    name, value = list(option.items())[-1]
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        hvdtrain.Trainer(compiled(), **option).train_on_batch(X, Y)
