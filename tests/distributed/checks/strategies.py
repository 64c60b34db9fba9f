"""The backends of tf.distribute against one process: weights, figures, random draws, and what they refuse."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from builders import BATCH, CROSS_ENTROPY, EPOCHS, MODELS, OPTIMIZERS, TOLERANCE, trained_alone
from checks.resuming import InterruptAfter, Interrupted
from checks.training import CROSSENTROPY, samples
from world import World, exact_arrays, flat_bytes, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.backends.central_storage import CentralStorageBackend
from hvdtrain.backends.single import SingleBackend
from hvdtrain.backends.tf_distribute import StrategyBackend
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.config.errors import ConfigError, DesyncError, LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.recipes import recipe
from hvdtrain.runs.run_data import run_data
from hvdtrain.runs.trainers import run_trainer
from hvdtrain.runtime.strategies import open_strategy
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan

REFUSED: dict[str, dict[str, Any]] = {
    "accumulate": {"accumulate": 2},
    "compression": {"compression": "bf16"},
    "gradient_groups": {"gradient_groups": 2},
    "predivide": {"predivide": 2.0},
    "sync_batch_norm": {"sync_batch_norm": True},
    "reduce_op='adasum'": {"reduce_op": "adasum"},
    "on_bad_step": {"on_bad_step": "rollback"},
    "spike_threshold": {"spike_threshold": 5.0},
}


def classifier(seed: int, *middle: Any) -> keras.Model:
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [keras.Input((5,)), keras.layers.Dense(8, activation="tanh"), *middle, keras.layers.Dense(3)]
    )


def another(world: World, name: Any) -> StrategyBackend:
    """A backend over the devices that this process has."""
    session = world.session
    kind = CentralStorageBackend if name == "central_storage" else StrategyBackend
    opened = open_strategy(RuntimeConfig(backend=name), session.environment, session.control, timeout=10)
    return kind(session, opened)


def backends_of(world: World) -> list[StrategyBackend]:
    if world.backend.name != "mirrored":
        return [world.backend]
    return [world.backend, another(world, "central_storage"), another(world, "one_device")]


def trained(backend: Any, kind: str, optimizer: str, dtype: str, seed: int = 0, **options: Any) -> hvdtrain.Trainer:
    build, data = MODELS[kind]
    model = lambda: build(dtype, seed=seed)  # noqa: E731
    trainer = hvdtrain.Trainer(model, OPTIMIZERS[optimizer], CROSS_ENTROPY, backend=backend, **options)
    trainer.fit(data(dtype), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False)
    return trainer


def error_of(world: World, trainer: hvdtrain.Trainer, kind: str, optimizer: str, dtype: str) -> float:
    return relative_error(trainer.model.get_weights(), world.reference(trained_alone, kind, optimizer, dtype))


def assert_parity(
    backends: Sequence[StrategyBackend], world: World, kind: str, optimizer: str, dtype: str, **options: Any
) -> None:
    for backend in backends:
        trainer = trained(backend, kind, optimizer, dtype, **options)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), "the ranks' weights differ"
        error = error_of(world, trainer, kind, optimizer, dtype)
        assert error <= TOLERANCE[dtype], f"{backend.name} {kind} {optimizer} {dtype}: {error:.2e}"
        for variable in trainer.model.weights:
            first, *others = [local.numpy() for local in local_values(backend, variable)]
            assert all((first == other).all() for other in others), f"the replicas' {variable.path} differ"


def local_values(backend: Any, variable: Any) -> Sequence[Any]:
    return backend._strategy.experimental_local_results(variable.value)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_dense_sgd_float32(world: World) -> None:
    trainer = trained(world.backend, "dense", "sgd", "float32")
    assert error_of(world, trainer, "dense", "sgd", "float32") <= TOLERANCE["float32"]


@worlds("mirrored", "multi_worker_mirrored", extended=True)
@exact_arrays()
def check_dense_adam_float64_from_the_chiefs_weights(world: World) -> None:
    """Each worker draws weights of its own, and all train those of the first; others have one process alone."""
    central = [another(world, "central_storage")] if world.backend.name == "mirrored" else []
    assert_parity([world.backend, *central], world, "dense", "adam", "float64", seed=world.rank)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_embedding_adam_float32(world: World) -> None:
    assert_parity(backends_of(world), world, "embedding", "adam", "float32")


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_embedding_sgd_made_dense(world: World) -> None:
    trainer = trained(world.backend, "embedding", "sgd", "float64", sparse_gradients="dense")
    assert error_of(world, trainer, "embedding", "sgd", "float64") <= TOLERANCE["float64"]


@worlds("mirrored")
@worlds("mpirun-2", "multi_worker_mirrored", extended=True)
def check_a_recipe_trains_to_the_loss_of_one_process(world: World) -> None:
    """The losses, not the weights: ReLU and max pooling turn rounding into other gradients, under Horovod just so."""
    expected = recipe_losses(SingleBackend(world.session))
    for backend in [each for each in backends_of(world) if each.size > 1]:
        np.testing.assert_allclose(recipe_losses(backend), expected, rtol=1e-5, err_msg=backend.name)


def recipe_losses(backend: Any) -> list[float]:
    """Return the mean loss over 8 steps of `digits`, which is measured in the last of them, and that of validation."""
    config = recipe("digits")
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build(source.training)
    result = trainer.train(source.training, Plan(8), validation=source.validation)
    return [result.train_loss, trainer.evaluate_on(source.validation).loss]


class Unreduced(StrategyBackend):
    """A backend whose gradients are each replica's own."""

    def grouped_all_reduce(self, tensors: Any, *, name: str, **factors: Any) -> list[tf.Tensor]:
        return list(tensors)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_the_comparison_notices(world: World) -> None:
    backend = Unreduced(world.session, world.session.strategy)
    try:
        error = error_of(world, trained(backend, "dense", "sgd", "float32"), "dense", "sgd", "float32")
    except DesyncError as refused:
        assert backend.processes > 1, refused  # each process sees its own replicas only
    else:
        assert error > 1e3 * TOLERANCE["float32"], f"the comparison did not notice: {error:.2e}"


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_the_steps_options(world: World) -> None:
    """Bounds, averages of weights, sums, XLA and recomputation, against one process without the last two."""

    def weights_with(backend: Any, optimizer: Callable[[], Any], **options: Any) -> list[np.ndarray]:
        trainer = hvdtrain.Trainer(lambda: classifier(0), optimizer, CROSSENTROPY, backend=backend, **options)
        trainer.fit(samples(50), batch=16, epochs=2, verbose=False, log_every=3)
        return [*trainer.model.get_weights(), *(np.array(v) for v in trainer.optimizer.variables)]

    alone, size = SingleBackend(world.session), world.size
    averaged = lambda: keras.optimizers.Adam(0.01, use_ema=True, weight_decay=0.01)  # noqa: E731
    plain, times = lambda: keras.optimizers.SGD(0.1), lambda: keras.optimizers.SGD(0.1 / size)
    for ours, theirs, options in [
        (averaged, averaged, {"clip_norm": 0.1, "jit": True, "steps_per_execution": 3}),
        (times, plain, {"reduce_op": "sum", "recompute": True, "steps_per_execution": 2}),
    ]:
        got = weights_with(world.backend, ours, **options)
        if world.backend.name == "mirrored":
            shared = {key: value for key, value in options.items() if key != "jit"}
            central = weights_with(another(world, "central_storage"), ours, **shared)
            assert relative_error(central, got) <= 1e-5, f"{options}: {relative_error(central, got):.2e}"
        expected = weights_with(alone, theirs, **{k: v for k, v in options.items() if k == "clip_norm"})
        if ours is times:
            got, expected = got[:4], expected[:4]  # the rates differ
        assert relative_error(got, expected) <= 1e-5, f"{options}: {relative_error(got, expected):.2e}"


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_an_overflow_is_skipped_by_all(world: World) -> None:
    x, y = samples(32)
    x[20] = 1e30  # infinite in fp16, on the last of two replicas only
    model = lambda: classifier(0, keras.layers.Dense(8))  # noqa: E731
    for backend in backends_of(world):
        trainer = hvdtrain.Trainer(model, "sgd", CROSSENTROPY, backend=backend, precision="mixed_float16")
        trainer.build(training_data((x, y), backend, batch=32, seed=0, shuffle=False, steps_per_epoch=None))
        before = flat_bytes(trainer.model.get_weights())
        scale = float(tf.convert_to_tensor(trainer.optimizer.dynamic_scale))
        trainer.fit((x, y), batch=32, shuffle=False, verbose=False)
        assert flat_bytes(trainer.model.get_weights()) == before
        assert float(tf.convert_to_tensor(trainer.optimizer.dynamic_scale)) == scale / 2


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_evaluation_and_prediction_are_those_of_one_process(world: World) -> None:
    x, y = samples(101)
    for backend in backends_of(world):
        sizes = (16, 100, 1000) if backend is world.backend else (100,)
        metrics = ["accuracy", keras.metrics.F1Score(average="macro", name="f1")]
        one_hot = np.eye(3, dtype="float32")[y]
        trainer = hvdtrain.Trainer(
            lambda: classifier(0), "sgd", keras.losses.CategoricalCrossentropy(from_logits=True), metrics,
            backend=backend,
        )  # fmt: skip
        reference = keras.metrics.F1Score(average="macro")
        for batch in sizes:  # 100 leaves a batch of one sample, of which one replica has none
            outcome = trainer.evaluate((x, one_hot), batch=batch, return_dict=True)
            logits = trainer.model(x).numpy()
            reference.reset_state()
            reference.update_state(one_hot, logits)
            assert round(outcome["accuracy"] * 101) == int((logits.argmax(1) == y).sum())
            np.testing.assert_allclose(outcome["f1"], float(reference.result()), rtol=1e-6)
            np.testing.assert_allclose(outcome["loss"], float(CROSSENTROPY(y, logits)), rtol=1e-6)
            np.testing.assert_allclose(trainer.predict(x, batch=batch), logits, rtol=1e-5, atol=1e-6)


@worlds("mirrored", "mpirun-2", "multi_worker_mirrored", extended=True)
def check_losses_with_masks_and_penalties_of_samples(world: World) -> None:
    """Divisors of losses are exchanged within a pass, between the replicas of one process, too."""
    rng = np.random.default_rng(0)
    data = rng.integers(0, 11, (50, 5)).astype("int32"), rng.integers(0, 3, (50, 5))
    for kind in (Reader, ReportingReader):
        found = {each.name: read(kind, data, each) for each in (SingleBackend(world.session), *backends_of(world))}
        weights, logs = found.pop("single")
        for name, (own, seen) in found.items():
            assert relative_error(own, weights) <= 1e-6, f"{kind.__name__} {name}: {relative_error(own, weights):.2e}"
            assert [each.keys() for each in seen] == [each.keys() for each in logs]
            for mine, theirs in zip(seen, logs, strict=True):
                np.testing.assert_allclose(list(mine.values()), list(theirs.values()), rtol=1e-5, err_msg=name)


@worlds("mirrored", extended=True)
def check_an_evaluation_that_is_refused_is_so_before_an_epoch_is_trained(world: World) -> None:
    data = np.zeros((16, 5), "int32"), np.zeros((16, 5), "int32")
    trainer = hvdtrain.Trainer(ReportingReader, "sgd", CROSSENTROPY, backend=world.backend)
    with pytest.raises(ConfigError, match="The step of ReportingReader is its own"):
        trainer.fit(data, batch=16, verbose=False, validation_data=data)
    assert not trainer.state.scalars.step
    trainer.fit(data, batch=16, verbose=False)


def read(kind: type, data: Any, backend: Any) -> tuple[list[np.ndarray], list[dict[str, float]]]:
    """Return the weights after an epoch, and what callbacks and an evaluation are given."""
    seen: list[dict[str, float]] = []

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        return kind()

    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(dict(logs)))
    # Strategies of tf.distribute refuse a step of one's own without it.
    apart = {} if backend.name in ("single", "horovod") else {"whole_batch": False}
    trainer = hvdtrain.Trainer(build, "sgd", CROSSENTROPY, ["accuracy"], backend=backend, **apart)
    trainer.fit(data, batch=16, verbose=False, callbacks=[note], validation_data=data)
    return trainer.model.get_weights(), [*seen, trainer.evaluate(data, batch=49, verbose=False, return_dict=True)]


class Reader(keras.Model):
    """A masked model that adds a penalty of its samples, beside one of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(11, 8, mask_zero=True)
        self.reading = keras.layers.Dense(4, "tanh", kernel_regularizer="l2")
        self.out = keras.layers.Dense(3)

    def call(self, inputs: Any) -> Any:
        read = self.reading(self.table(inputs))
        self.add_loss(10.0 * keras.ops.mean(read**2))
        return self.out(read)


class ReportingReader(Reader):
    """One that reports a number of its own in evaluation."""

    def test_step(self, data: Any) -> Any:
        return {**super().test_step(data), "size": tf.reduce_mean(tf.abs(self(data[0])))}


@worlds("mirrored", extended=True)
def check_central_storage_refuses_layers_that_change_variables(world: World) -> None:
    class Counting(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls = tf.Variable(0, trainable=False)

        def call(self, inputs: Any) -> Any:
            self.calls.assign_add(1)
            return inputs

    kinds = {"BatchNormalization": keras.layers.BatchNormalization, "Dropout": lambda: keras.layers.Dropout(0.5)}
    for name, layer in (kinds | {"Sequential": Counting}).items():
        backend, data = another(world, "central_storage"), samples(50)
        trainer = hvdtrain.Trainer(lambda layer=layer: classifier(0, layer()), "sgd", CROSSENTROPY, backend=backend)
        if layer is not Counting:
            trainer.evaluate(data, batch=16, verbose=False)  # changes none
        with pytest.raises(ConfigError, match=rf"one copy of each variable .* as {name}.* changes .*mirrored"):
            trainer.fit(data, batch=16, verbose=False)
        assert not trainer.state.scalars.step


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_callbacks_see_figures_over_all_replicas(world: World) -> None:
    seen: list[dict[str, float]] = []
    note = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(dict(logs)), on_train_batch_end=lambda batch, logs: None
    )
    stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1, min_delta=10.0)
    kept = keras.callbacks.ModelCheckpoint(str(world.folder / f"{world.backend.name}.keras"))
    still = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
    trainer = hvdtrain.Trainer(lambda: classifier(0), still, CROSSENTROPY, ["accuracy"], backend=world.backend)
    data = samples(50)
    result = trainer.fit(data, batch=16, epochs=9, validation_data=data, verbose=False, callbacks=[note, stop, kept])
    assert result.epochs == 2
    np.testing.assert_allclose(seen[0]["accuracy"], seen[0]["val_accuracy"], rtol=1e-6)
    np.testing.assert_allclose(seen[0]["loss"], seen[0]["val_loss"], rtol=1e-6)
    assert world.same_everywhere(repr(seen).encode())
    if world.rank == 0:
        again = keras.models.load_model(world.folder / f"{world.backend.name}.keras")
        assert flat_bytes(again.get_weights()) == flat_bytes(trainer.model.get_weights())


@worlds("mirrored")
@worlds("multi_worker_mirrored", extended=True)
def check_statistics_are_averaged_and_replicas_draw_differently(world: World) -> None:
    """With a rate of zero BatchNorm's statistics are the means of those of each replica's samples."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((5,)), keras.layers.BatchNormalization(momentum=0.0), Drawn(), keras.layers.Dense(3)]
        )

    still = lambda: keras.optimizers.SGD(0.0)  # noqa: E731
    trainer = hvdtrain.Trainer(build, still, CROSSENTROPY, backend=world.backend)
    x, y = samples(32)
    trainer.fit((x, y), batch=32, shuffle=False, verbose=False)
    normalization, drawn = trainer.model.layers[0], trainer.model.layers[1]
    halves = x[:16], x[16:]
    np.testing.assert_allclose(normalization.moving_mean.numpy(), x.mean(0), rtol=1e-5, atol=1e-6)
    variance = np.mean([half.var(0) for half in halves], axis=0)
    np.testing.assert_allclose(normalization.moving_variance.numpy(), variance, rtol=1e-5)
    # Its statistics are averages too: of two equal draws the mean of the squares is the square of the mean.
    mean, squares = drawn.mean.numpy(), drawn.square.numpy()
    assert squares - mean**2 > 1e-6, "the replicas drew the same numbers"


class Drawn(keras.layers.Layer):
    """Passes its input on, and keeps a number that it draws, and its square."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = keras.random.SeedGenerator(0)
        self.mean = self.add_weight(shape=(), trainable=False, initializer="zeros", name="mean")
        self.square = self.add_weight(shape=(), trainable=False, initializer="zeros", name="square")

    def call(self, inputs: Any, training: bool = False) -> Any:
        if training:
            number = keras.random.uniform((), seed=self.generator)
            self.mean.assign(number)
            self.square.assign(number**2)
        return inputs


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_a_checkpoint_reaches_every_replica(world: World) -> None:
    trainer = trained(world.backend, "dense", "adam", "float32")
    expected = flat_bytes(trainer.model.get_weights())
    state = trainer.state
    files = Checkpointer(world.folder / f"of-{world.backend.name}", backend=world.backend)
    files.save(20, state.named_tensors(), asdict(state.scalars))
    for variable in (tensor.value for tensor in state.named_tensors().values()):
        variable.assign(tf.zeros_like(variable))
    trainer.restore(files.find())
    assert flat_bytes(trainer.model.get_weights()) == expected
    assert int(tf.convert_to_tensor(trainer.optimizer.iterations)) == state.scalars.step == 20
    assert len(state.agreed_hash(world.backend)) == 64
    for variable in trainer.model.weights:
        first, *others = [local.numpy() for local in local_values(world.backend, variable)]
        assert all((first == other).all() for other in others)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_an_epoch_goes_on_with_its_metrics(world: World) -> None:
    data, sgd = samples(50), lambda: keras.optimizers.SGD(0.1)
    fit = {"batch": 16, "epochs": 2, "verbose": False}

    def fitted(*callbacks: Any, **options: Any) -> dict[str, list[float]]:
        trainer = hvdtrain.Trainer(lambda: classifier(0), sgd, CROSSENTROPY, ["accuracy"], backend=world.backend)
        if "checkpoint" in options:
            trainer.resume(options["checkpoint"].folder)
        return trainer.fit(data, **fit, callbacks=callbacks, **options).history

    saves = hvdtrain.Checkpoint(str(world.folder / f"epoch-{world.backend.name}"), every=3)
    with pytest.raises(Interrupted):
        fitted(InterruptAfter(8), checkpoint=saves)
    went_on, at_a_stretch = fitted(checkpoint=saves), fitted()
    for name, values in went_on.items():
        np.testing.assert_allclose(values, at_a_stretch[name][-len(values) :], rtol=1e-6, err_msg=name)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_what_is_refused(world: World) -> None:
    name, build = world.backend.name, lambda: classifier(0)
    for option, given in REFUSED.items():
        with pytest.raises(ConfigError, match=f"{option}.* does not go with backend='{name}'"):
            hvdtrain.Trainer(build, "sgd", CROSSENTROPY, backend=world.backend, **given)
    with pytest.raises(ConfigError, match="give Trainer a function that builds the model"):
        hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, backend=world.backend)
    with pytest.raises(ConfigError, match="give Trainer a function that builds the optimizer"):
        hvdtrain.Trainer(build, keras.optimizers.SGD(0.1), CROSSENTROPY, backend=world.backend)

    class OwnStep(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {}

    with pytest.raises(ConfigError, match=f"train_step of OwnStep .* does not go with backend='{name}'"):
        hvdtrain.Trainer(OwnStep, "sgd", CROSSENTROPY, backend=world.backend)
    with hvdtrain.DistributedGradientTape(exchange=world.backend) as tape:
        value = (variable := tf.Variable(1.0)) * 2.0
    with pytest.raises(ConfigError, match="exchanges tensors only within its replicas"):
        tape.gradient(value, [variable])
    with pytest.raises(ConfigError, match=f"backend='{name}' exchanges tensors only within its replicas"):
        hvdtrain.allreduce(1.0)
    for call, lacks in ((hvdtrain.broadcast, "broadcast of tensors"), (hvdtrain.alltoall, "all-to-all")):
        with pytest.raises(ConfigError, match=f"tf.distribute has no {lacks}: backend='{name}'"):
            call([1.0])
    trainer = hvdtrain.Trainer(build, "sgd", CROSSENTROPY, backend=world.backend)
    with pytest.raises(ConfigError, match="does not divide among 2"):
        trainer.fit(samples(50), batch=15, verbose=False)


@worlds("mirrored", "multi_worker_mirrored", extended=True)
def check_devices_that_are_not_there_are_not_made_up(world: World) -> None:
    """The CPU was cut into two when TensorFlow started."""
    if world.backend.name == "multi_worker_mirrored":
        return
    session = world.session
    config = replace(RuntimeConfig(backend="mirrored"), replicas=3)
    with pytest.raises(LaunchError, match="needs 3 devices"):
        open_strategy(config, session.environment, session.control, timeout=10)
