"""What a trainer makes of a model that was compiled."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.optim.precision import LossScaleOptimizer
from hvdtrain.training.trainer import Trainer
from tests.builders import cross_entropy, samples

pytestmark = pytest.mark.usefixtures("session")

X, Y = samples(32, 4, 4)
WEIGHTS = np.random.default_rng(1).random(32).astype("float32")
CROSSENTROPY = cross_entropy()


def dense(**options):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, **options)])


def compiled(model=None, **settings):
    model = model or dense()
    model.compile(**{"optimizer": keras.optimizers.Adam(0.05), "loss": CROSSENTROPY, **settings})
    return model


def fitted(trainer, data=(X, Y), **options):
    return trainer.fit(data, batch=8, shuffle=False, **{"epochs": 2, "verbose": False, **options})


def warnings_of(capsys, trainer, **options):
    fitted(trainer, verbose=True, epochs=1, **options)
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if line.startswith("warning: ") and "compiled" in line]


def two_heads():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((4,))
    return keras.Model(inputs, {name: keras.layers.Dense(2, name=name)(inputs) for name in ("a", "b")})


class OwnStep(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


# -- what is taken over --


def test_a_compiled_model_is_trained_as_keras_would():
    def settings():
        weighted = keras.metrics.SparseCategoricalCrossentropy(name="weighted", from_logits=True)
        return {"metrics": ["accuracy"], "weighted_metrics": [weighted]}

    theirs = compiled(**settings())
    theirs.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    expected = theirs.evaluate(X, Y, sample_weight=WEIGHTS, verbose=0, return_dict=True)
    trainer = Trainer(compiled(**settings()))
    assert trainer.optimizer is trainer.model.optimizer
    fitted(trainer)
    for ours, reference in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)
    outcome = trainer.evaluate((X, Y, WEIGHTS), return_dict=True)
    assert outcome == pytest.approx(expected, rel=1e-5)


def test_losses_of_two_outputs_keep_their_weights():
    data = (X, {"a": Y % 2, "b": X[:, :2]})
    settings = {"loss": {"a": CROSSENTROPY, "b": "mse"}, "loss_weights": {"a": 1.0, "b": 5.0}}
    theirs = compiled(two_heads(), **settings)
    theirs.fit(*data, batch_size=8, epochs=2, shuffle=False, verbose=0)
    trainer = Trainer(compiled(two_heads(), **settings))
    fitted(trainer, data)
    for ours, reference in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def test_what_is_given_goes_before_what_was_compiled():
    rule = keras.optimizers.SGD(0.1)
    trainer = Trainer(
        compiled(loss_weights=[3.0], metrics=["accuracy"], weighted_metrics=["mae"]), rule, "mse", ["mse"]
    )
    assert trainer.optimizer is rule
    outcome = trainer.evaluate((X, X), return_dict=True)
    assert set(outcome) == {"loss", "mse"}, "metrics and weighted metrics go together"
    assert outcome["loss"] == pytest.approx(outcome["mse"], rel=1e-6), "a loss keeps no weight of another"
    assert Trainer(compiled(metrics=["accuracy"]), metrics=[]).evaluate((X, Y), return_dict=True).keys() == {"loss"}


def test_a_model_that_was_loaded_goes_on_with_its_optimizers_state(tmp_path):
    theirs = compiled()
    theirs.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    theirs.save(tmp_path / "model.keras")
    trainer = Trainer(keras.models.load_model(tmp_path / "model.keras"))
    fitted(trainer, epochs=1)
    theirs.fit(X, Y, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert int(trainer.optimizer.iterations) == 8
    for ours, reference in zip(trainer.model.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(ours, reference, rtol=1e-5, atol=1e-6)


def test_a_loaded_loss_scale_is_kept(tmp_path):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = dense()
    finally:
        keras.config.set_dtype_policy("float32")
    compiled(model, optimizer=LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(16.0)
    model.save(tmp_path / "model.keras")
    trainer = Trainer(keras.models.load_model(tmp_path / "model.keras"))
    assert float(trainer.state.optimizer.dynamic_scale) == 16.0


def test_a_train_step_of_its_own_takes_them_over_too():
    model = OwnStep()
    compiled(model, metrics=["accuracy"])
    trainer = Trainer(model)
    before = trainer.evaluate((X, Y), return_dict=True)
    fitted(trainer, epochs=5)
    assert trainer.evaluate((X, Y), return_dict=True)["loss"] < before["loss"]
    assert isinstance(trainer.optimizer, keras.optimizers.Adam)
    again = Trainer(model)
    assert again.optimizer is trainer.optimizer
    assert model.optimizer is trainer.optimizer, "the model keeps its own optimizer"


# -- what is said --


def test_nothing_is_said_of_settings_that_are_used(capsys):
    loss, rule = keras.losses.SparseCategoricalCrossentropy(from_logits=True), keras.optimizers.SGD(0.1)
    assert warnings_of(capsys, Trainer(compiled(metrics=["accuracy"]))) == []
    same = compiled(optimizer=rule, loss=loss, metrics=["accuracy"])
    assert warnings_of(capsys, Trainer(same, rule, loss, ["accuracy"])) == []
    assert warnings_of(capsys, Trainer(dense(), "sgd", CROSSENTROPY)) == []
    trainer = Trainer(dense(), "sgd", CROSSENTROPY)
    fitted(trainer, callbacks=[keras.callbacks.Callback()])
    assert warnings_of(capsys, Trainer(trainer.model, "adam", CROSSENTROPY)) == [], "the first trainer compiled it"


def test_settings_that_are_not_used_are_named(capsys):
    others = compiled(metrics=["accuracy"], weighted_metrics=["sparse_categorical_accuracy"])
    assert warnings_of(capsys, Trainer(others, "sgd", "sparse_categorical_crossentropy", ["accuracy"])) == [
        "warning: Trainer was given others than the model was compiled with, and uses them: optimizer, loss, "
        "weighted_metrics."
    ]
    assert warnings_of(capsys, Trainer(compiled(run_eagerly=True))) == [
        "warning: settings that the model was compiled with have no effect here: run_eagerly=True."
    ]


def test_steps_in_one_call_are_those_of_compile_or_of_the_option():
    assert Trainer(compiled(steps_per_execution=4)).options.steps_per_execution == 4
    trainer = Trainer(compiled(steps_per_execution=4), "sgd", CROSSENTROPY)
    again = Trainer(trainer.model)
    assert again.options.steps_per_execution == again.model.steps_per_execution == 4
    option = Trainer(compiled(steps_per_execution=4), steps_per_execution=2)
    assert option.options.steps_per_execution == option.model.steps_per_execution == 2


# -- what cannot be --


def test_an_optimizer_of_another_models_variables_is_refused():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    compiled(model).optimizer.build(model.trainable_variables)
    with pytest.raises(ConfigError, match=r"may be a copy \(sync_batch_norm=True makes one\): give a new optimizer"):
        Trainer(model, sync_batch_norm=True)
    assert Trainer(model, "sgd", sync_batch_norm=True).model is not model
    with pytest.raises(ConfigError, match="was built for other variables than those of the model"):
        Trainer(dense(), model.optimizer, CROSSENTROPY)


def test_a_compiled_models_optimizer_must_not_exchange_by_itself():
    with pytest.raises(ConfigError, match="DistributedOptimizer would do it again: pass its inner optimizer"):
        Trainer(compiled(optimizer=DistributedOptimizer(keras.optimizers.SGD())))


class InNumPy(keras.metrics.Mean):
    def update_state(self, y_true, y_pred, sample_weight=None):
        super().update_state(np.abs(y_pred.numpy()))


class Printing(keras.layers.Layer):
    def call(self, inputs):
        return inputs * float(np.max(inputs.numpy()))


@pytest.mark.parametrize(
    "model",
    [
        lambda: compiled(metrics=[InNumPy(name="own")], run_eagerly=True),
        lambda: compiled(keras.Sequential([Printing(), keras.layers.Dense(4)]), run_eagerly=True),
    ],
)
def test_numpy_code_of_an_eager_model_is_refused_with_the_cure(model):
    with pytest.raises(
        ConfigError, match=r"(?s)run_eagerly=True, and steps are compiled functions here.*tf\.numpy_function"
    ):
        Trainer(model()).fit(X, Y, batch=8, verbose=0)
