"""Parameter servers, as the chief sees them, with one worker: its steps are those of one process."""

from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from builders import BATCH, CROSS_ENTROPY, EPOCHS, MODELS, OPTIMIZERS, TOLERANCE, trained_alone
from checks.training import CROSSENTROPY, samples
from world import World, flat_bytes, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.backends.single import SingleBackend
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError

REFUSED: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "reduce_op='sum'": {"reduce_op": "sum"},
    "compression": {"compression": "bf16"},
    "sparse_gradients": {"sparse_gradients": "dense"},
    "gradient_groups": {"gradient_groups": 2},
    "predivide": {"predivide": 2.0},
    "sync_batch_norm": {"sync_batch_norm": True},
    "jit": {"jit": True},
    "recompute": {"recompute": True},
    "on_bad_step": {"on_bad_step": "skip"},
    "spike_threshold": {"spike_threshold": 5.0},
    "desync_every": {"desync_every": 10},
}


def classifier(*middle: Any) -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), *middle, keras.layers.Dense(3)]
    )


def trained(backend: Any, kind: str, optimizer: str, dtype: str) -> hvdtrain.Trainer:
    build, data = MODELS[kind]
    keras.utils.clear_session(free_memory=False)  # the same names in every model
    trainer = hvdtrain.Trainer(lambda: build(dtype, seed=0), OPTIMIZERS[optimizer], CROSS_ENTROPY, backend=backend)
    trainer.fit(data(dtype), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
    return trainer


def assert_parity(world: World, kind: str, optimizer: str, dtype: str) -> None:
    trainer = trained(world.backend, kind, optimizer, dtype)
    error = relative_error(trainer.model.get_weights(), world.reference(trained_alone, kind, optimizer, dtype))
    assert error <= TOLERANCE[dtype], f"{kind} {optimizer} {dtype}: {error:.2e}"


@worlds("parameter_server", extended=True)
def check_embedding_adam_float64(world: World) -> None:
    assert_parity(world, "embedding", "adam", "float64")


@worlds("parameter_server", extended=True)
def check_variables_lie_on_all_servers(world: World) -> None:
    assert dict(world.backend.roles) == {"chief": 1, "worker": 1, "parameter server": 2}
    build, _ = MODELS["dense"]
    trainer = hvdtrain.Trainer(lambda: build("float32", seed=0), "adam", CROSS_ENTROPY, backend=world.backend)
    places = {variable.value.device.partition("/replica")[0] for variable in trainer.model.weights}
    tasks = {variable.value.device.partition("/task:")[2][0] for variable in trainer.model.weights}
    assert (places, tasks) == ({"/job:ps"}, {"0", "1"})
    assert trainer.state.counter.device.startswith("/job:ps")


@worlds("parameter_server", extended=True)
def check_layers_that_draw_and_keep_statistics(world: World) -> None:
    """Dropout draws what it draws in one process, and moving statistics are kept."""

    def build() -> keras.Model:
        return classifier(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5))

    averaged = lambda: keras.optimizers.Adam(0.01, use_ema=True, weight_decay=0.01)  # noqa: E731
    found = []
    for backend in (world.backend, SingleBackend(world.session)):
        trainer = hvdtrain.Trainer(build, averaged, CROSSENTROPY, backend=backend, clip_norm=0.5)
        trainer.fit(samples(50), batch=16, epochs=3, verbose=False)
        found.append([*trainer.model.get_weights(), *(np.array(v) for v in trainer.optimizer.variables)])
    assert relative_error(*found) <= 1e-5, f"{relative_error(*found):.2e}"


@worlds("parameter_server", extended=True)
def check_evaluation_and_prediction_are_those_of_one_process(world: World) -> None:
    x, y = samples(101)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")]
    trainer = hvdtrain.Trainer(classifier, "sgd", CROSSENTROPY, metrics, backend=world.backend)
    for batch in (16, 1000):
        outcome = trainer.evaluate((x, y), batch=batch, return_dict=True)
        logits = trainer.predict(x, batch=batch)
        np.testing.assert_allclose(logits, trainer.model(x).numpy(), rtol=1e-5, atol=1e-6)
        assert round(outcome["accuracy"] * 101) == int((logits.argmax(1) == y).sum())
        np.testing.assert_allclose(outcome["loss"], float(CROSSENTROPY(y, logits)), rtol=1e-5)


@worlds("parameter_server", extended=True)
def check_checkpoints_are_those_of_one_process(world: World) -> None:
    """What the chief saves one process goes on with, and the other way round."""
    alone = SingleBackend(world.session)
    saved = [trained(backend, "dense", "adam", "float32") for backend in (world.backend, alone)]
    assert relative_error(*(of.model.get_weights() for of in saved)) <= TOLERANCE["float32"]
    for number, (of, to) in enumerate([(saved[0], alone), (saved[1], world.backend)]):
        files = Checkpointer(world.folder / f"checkpoint{number}")
        files.save(20, of.state.named_tensors(), asdict(of.state.scalars))
        build, data = MODELS["dense"]
        keras.utils.clear_session(free_memory=False)
        model = lambda build=build: build("float32", seed=1)  # noqa: E731
        again = hvdtrain.Trainer(model, OPTIMIZERS["adam"], CROSS_ENTROPY, backend=to)
        again.predict(data("float32")[0][:1])
        _ = again.state
        again.restore(files.find())
        again.broadcast_state()
        assert flat_bytes(again.model.get_weights()) == flat_bytes(of.model.get_weights())
        assert int(again.optimizer.iterations) == again.state.scalars.step == 20
        assert again.state.agreed_hash(to) == of.state.agreed_hash(alone)


@worlds("parameter_server", extended=True)
def check_callbacks(world: World) -> None:
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0)
    kept = keras.callbacks.ModelCheckpoint(str(world.folder / "best.keras"))
    slower = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1 * 0.5**epoch)
    ended: dict[str, list[int]] = {"train": [], "test": []}
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ended["train"].append(batch))
    note.on_test_batch_end = lambda batch, logs=None: ended["test"].append(batch)
    trainer = hvdtrain.Trainer(
        classifier, "sgd", CROSSENTROPY, ["accuracy"], backend=world.backend, steps_per_execution=3
    )
    data = samples(50)
    result = trainer.fit(
        data, batch=16, epochs=9, validation_data=data, verbose=False, callbacks=[stop, kept, slower, note]
    )
    assert result.epochs == 2
    assert ended == {"train": [2, 5] * 2, "test": [2, 5] * 2}, ended
    assert float(tf.convert_to_tensor(trainer.optimizer.learning_rate)) == pytest.approx(0.05)
    again = keras.models.load_model(world.folder / "best.keras")
    assert flat_bytes(again.get_weights()) == flat_bytes(trainer.model.get_weights())


@worlds("parameter_server", extended=True)
def check_a_workers_error_is_the_chiefs(world: World) -> None:
    """The first of those that fail, also where others were waiting."""
    workers = world.backend.workers

    @tf.function
    def divide(by: tf.Tensor) -> tf.Tensor:
        return 1 // by

    called = [workers.schedule(divide, tf.constant(number)) for number in (1, 0, 2, 3)]
    with pytest.raises(tf.errors.InvalidArgumentError, match="zero"):
        workers.join()
    assert called[0].fetch() == 1
    workers.join()
    assert workers.schedule(divide, tf.constant(1)).fetch() == 1


@worlds("parameter_server", extended=True)
def check_what_is_refused(world: World) -> None:
    name = world.backend.name
    for option, given in REFUSED.items():
        with pytest.raises(ConfigError, match=f"{option}.* does not go with backend='{name}'"):
            hvdtrain.Trainer(classifier, "sgd", CROSSENTROPY, backend=world.backend, **given)
    half = lambda: classifier(keras.layers.Dense(8))  # noqa: E731
    with pytest.raises(ConfigError, match="scales the loss dynamically, does not go with backend='parameter_server'"):
        hvdtrain.Trainer(half, "sgd", CROSSENTROPY, backend=world.backend, precision="mixed_float16")
    with pytest.raises(ConfigError, match="give Trainer a function that builds the model"):
        hvdtrain.Trainer(classifier(), "sgd", CROSSENTROPY, backend=world.backend)

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    with pytest.raises(ConfigError, match=f"train_step of OwnStep .* does not go with backend='{name}'"):
        hvdtrain.Trainer(OwnStep, "sgd", CROSSENTROPY, backend=world.backend)
    with pytest.raises(ConfigError, match="exchange nothing with one another"):
        hvdtrain.DistributedGradientTape()
