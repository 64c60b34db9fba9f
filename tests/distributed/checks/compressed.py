"""Models that lose weights, or train adapters, while ranks train them: as Keras does in one process."""

from collections.abc import Callable
from typing import Any, Literal

import keras
import numpy as np
from as_keras import assert_same, assert_trained_as_keras
from keras import layers
from meshes import on_mesh
from world import World, computing_in, flat_bytes, refused
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError

SAMPLES, BATCH = 44, 8
"""Of six steps an epoch, the last has four samples."""


def image_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    stack = [keras.Input((6, 6, 4)), layers.Conv2D(8, 3, activation="relu", name="conv"), layers.Flatten()]
    return keras.Sequential(
        [*stack, layers.Dense(64, "relu", name="hidden"), layers.Dense(64, "tanh"), layers.Dense(3)]
    )


def pruned_model() -> keras.Model:
    model = image_model()
    hvdtrain.prune(model, 0.6, layers="conv|hidden", begin=1, steps=6, every=2)
    return model


def patterned_model() -> keras.Model:
    model = image_model()
    hvdtrain.prune(model, pattern="2:4", begin=2)
    return model


def narrowed_model() -> keras.Model:
    model = image_model()
    hvdtrain.prune(model, pattern="channels", begin=1, steps=6, every=2)
    return model


def adapted_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6, 16))
    x = layers.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    x = layers.BatchNormalization(name="norm")(x)
    model = keras.Model(inputs, layers.Dense(3, name="last")(layers.GlobalAveragePooling1D()(x)))
    hvdtrain.lora(model, 4, layers="query|value|last")
    return model


def data(shape: tuple[int, ...], dtype: str = "float64") -> dict[str, Any]:
    draws = np.random.default_rng(0)
    return {"x": draws.standard_normal((SAMPLES, *shape)).astype(dtype), "y": draws.integers(0, 3, SAMPLES)}


def compiled() -> dict[str, Any]:
    return {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    }


def zeros(model: keras.Model, name: str) -> float:
    return float((model.get_layer(name).kernel.numpy() == 0).mean())


def as_keras(
    world: World, build: Callable[[], keras.Model], shape: tuple[int, ...], **options: Any
) -> hvdtrain.Trainer:
    fit = {**data(shape), "batch_size": BATCH, "epochs": 2, "shuffle": False}
    return assert_trained_as_keras(world, build, compiled, lambda: fit, options=options)


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-4", extended=True, why="masks of four ranks")
def check_pruned_models_are_those_of_one_process(world: World) -> None:
    options: list[dict[str, Any]] = [{}, {"zero": 3}] if world.size == 2 else [{}]
    for more in options:
        trainer = as_keras(world, pruned_model, (6, 6, 4), **more)
        assert abs(zeros(trainer.model, "hidden") - 0.6) < 1e-3, more
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), more


@worlds("mpirun-2", extended=True, why="zeros of biases follow those of kernels")
def check_models_that_lose_channels_are_those_of_one_process(world: World) -> None:
    for options in ({}, {"zero": 3}, {"zero": 1, "accumulate": 2}):
        trainer = as_keras(world, narrowed_model, (6, 6, 4), **options)
        hvdtrain.finish_pruning(trainer.model)
        smaller = hvdtrain.take_out_channels(trainer.model)
        assert smaller.get_layer("hidden").units == 32, options
        assert world.same_everywhere(flat_bytes(smaller.get_weights())), options


@worlds("mpirun-2", extended=True, why="the same with every option of a step that goes with a constraint")
def check_pruned_models_go_with_options(world: World) -> None:
    for build in (pruned_model, patterned_model):
        for options in ({"accumulate": 2}, {"zero": 1}, {"clip_norm": 1.0}, {"jit": True}):
            with computing_in("float64"):
                alone = build()
                alone.compile(**compiled())
                clipped = options.get("clip_norm")
                if clipped:
                    alone.optimizer.global_clipnorm = clipped
                alone.fit(**data((6, 6, 4)), batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
                model = build()
                model.compile(**compiled())
                trainer = hvdtrain.Trainer(model, backend=world.backend, **options)
                trainer.fit(**data((6, 6, 4)), batch=BATCH, epochs=2, shuffle=False, verbose=0)
                assert_same(trainer.model.get_weights(), alone.get_weights(), f"{options}", 1e-9)
        assert zeros(trainer.model, "hidden") in (0.5, 0.6) or build is pruned_model


@worlds("mpirun-2", extended=True, why="a checkpoint within the schedule")
def check_masks_go_on_from_a_checkpoint(world: World) -> None:
    with computing_in("float64"):
        arguments = {**data((6, 6, 4)), "batch": BATCH, "shuffle": False, "verbose": 0}

        def trainer() -> hvdtrain.Trainer:
            model = pruned_model()
            model.compile(**compiled())
            return hvdtrain.Trainer(model, backend=world.backend)

        whole = trainer()
        whole.fit(**arguments, epochs=2)
        first = trainer()
        first.fit(**arguments, epochs=1, checkpoint=world.folder / "masks")
        again = trainer()
        again.resume(world.folder / "masks")
        again.fit(**arguments, epochs=2)
        assert flat_bytes(again.model.get_weights()) == flat_bytes(whole.model.get_weights())
        assert 0 < zeros(first.model, "hidden") < zeros(again.model, "hidden")


@worlds("mpirun-2", extended=True, why="what a mask does not go with")
def check_what_masks_do_not_go_with_is_refused(world: World) -> None:
    def train(optimizer: Any = "adam", build: Callable[[], keras.Model] = pruned_model, **options: Any) -> None:
        trainer = hvdtrain.Trainer(build(), optimizer, compiled()["loss"], backend=world.backend, **options)
        trainer.fit(**data((6, 6, 4), "float32"), batch=BATCH, verbose=0)

    def normalized() -> keras.Model:
        images = keras.Input((6, 6, 4))
        x = layers.BatchNormalization(name="norm")(layers.Conv2D(8, 3, name="conv")(images))
        model = keras.Model(images, layers.Dense(3, name="last")(layers.Flatten()(x)), name="pruned")
        hvdtrain.prune(model)
        return model

    for options in ({"local_steps": 2}, {"update": "async"}, {"update": "gossip"}, {"update": "easgd"}):
        with refused("ranks with other weights would choose other zeros", ConfigError):
            train(**options)
    with refused("an average over steps is not zero where the weight is", ConfigError):
        train(keras.optimizers.SGD(0.1, use_ema=True))
    with refused("Use hvdtrain.SyncBatchNormalization in the model's code instead", ConfigError):
        train(build=normalized, sync_batch_norm=True)


@worlds("mpirun-2")
def check_adapters_are_those_of_one_process(world: World) -> None:
    """Their gradients alone are exchanged; statistics of BatchNormalization, which differ by slice, are frozen."""

    def build() -> keras.Model:
        model = adapted_model()
        model.get_layer("norm").trainable = False
        model.compile(**compiled())
        return model

    fit = {**data((6, 16)), "epochs": 2, "shuffle": False, "verbose": 0}
    with computing_in("float64"):
        alone, model = build(), build()
        alone.fit(**fit, batch_size=BATCH)
        start = [np.array(weight) for weight in model.get_weights()]
        trainer = hvdtrain.Trainer(model, backend=world.backend)
        trainer.fit(**fit, batch=BATCH)
    trained = [weight.path for weight in model.trainable_variables]
    assert len(trained) == 6
    assert all("lora_kernel" in path for path in trained)
    changed = [not np.array_equal(*pair) for pair in zip(model.get_weights(), start, strict=True)]
    assert [weight.path for weight, other in zip(model.weights, changed, strict=True) if other] == trained
    # Keras keeps adapters in 32 bits, whatever the model computes in.
    assert_same(trainer.model.get_weights(), alone.get_weights(), "weights", 1e-5)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    hvdtrain.merge_lora(trainer.model)
    assert_same(trainer.model.predict(fit["x"], verbose=0), alone.predict(fit["x"], verbose=0), "merged", 1e-5)


def rounded_model(mode: Literal["int8", "int4"] = "int8") -> keras.Model:
    model = image_model()
    hvdtrain.fake_quantize(model, mode)
    return model


@worlds("mpirun-2")
@worlds("gloo-4", extended=True, why="rows of four ranks")
def check_rounded_models_are_those_of_one_process(world: World) -> None:
    """A sample is rounded by itself, so that it is the same on whatever rank."""
    for options in ({}, {"zero": 3}, {"accumulate": 2}, {"clip_norm": 100.0, "zero": 1}):
        trainer = as_keras(world, rounded_model, (6, 6, 4), **options)
        assert world.same_everywhere(flat_bytes(trainer.model.get_weights())), options


@worlds("mpirun-2", extended=True, why="the other mode, with XLA")
def check_rounded_models_of_4_bits_are_those_of_one_process(world: World) -> None:
    for options in ({}, {"jit": True}):
        as_keras(world, lambda: rounded_model("int4"), (6, 6, 4), **options)


@worlds("mpirun-2", extended=True, why="layers of which ranks have slices")
def check_layers_that_are_cut_are_refused(world: World) -> None:
    """A rank would choose zeros of its slice, and take the scale of its slice for that of the kernel."""
    changes: dict[str, Callable[..., Any]] = {
        "prune": lambda model: hvdtrain.prune(model, 0.5, layers="up|down"),
        "fake_quantize": lambda model: hvdtrain.fake_quantize(model, layers="up|down"),
        "lora": lambda model: hvdtrain.lora(model, 2, layers="up|down"),
    }
    rules = {"up/kernel": (None, "tp"), "up/bias": ("tp",), "down/kernel": ("tp", None)}

    def build() -> keras.Model:
        x = keras.Input((8,))
        return keras.Model(x, layers.Dense(4, name="down")(layers.Dense(16, "relu", name="up")(x)))

    with on_mesh(world, "tp=2"):
        for name, change in changes.items():

            def changed(change: Callable[..., Any] = change) -> keras.Model:
                model = build()
                change(model)
                return model

            with refused(f"{name} takes layers that a rank holds whole. Received: 'up'", ConfigError):
                change(hvdtrain.parallelize(build, rules))
            with refused("whole variable" if name == "prune" else "cannot be cut", ConfigError):
                hvdtrain.parallelize(changed, rules)


def distiller() -> keras.Model:
    """Keras' own, from the outputs of a teacher and from a layer within it."""
    keras.utils.set_random_seed(2)
    inputs = keras.Input((12,))
    x = layers.Dense(8, "relu", name="hidden")(layers.Dense(32, "relu")(inputs))
    teacher = keras.Model(inputs, layers.Dense(3)(x), name="teacher")
    small = keras.Input((12,))
    student = keras.Model(small, layers.Dense(3)(layers.Dense(8, "relu", name="hidden")(small)), name="student")
    losses = [
        keras.distillation.LogitsDistillation(4.0, loss=keras.losses.KLDivergence()),
        keras.distillation.FeatureDistillation(teacher_layer_name="hidden", student_layer_name="hidden"),
    ]
    return keras.distillation.Distiller(teacher, student, losses, [1.0, 0.5], student_loss_weight=0.3)


@worlds("mpirun-2")
def check_students_are_those_of_one_process(world: World) -> None:
    with computing_in("float64"):
        before = distiller().teacher.get_weights()
        trainer = as_keras(world, distiller, (12,))
        assert len(trainer.model.trainable_variables) == 4
        assert_same(trainer.model.teacher.get_weights(), before, "teacher", 0)
        alone = trainer.model.get_weights()
        for options in ({"accumulate": 2}, {"zero": 1}):
            model = distiller()
            model.compile(**compiled())
            trainer = hvdtrain.Trainer(model, backend=world.backend, **options)
            trainer.fit(**data((12,)), batch=BATCH, epochs=2, shuffle=False, verbose=0)
            assert_same(trainer.model.get_weights(), alone, f"{options}")
