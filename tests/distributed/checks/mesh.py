"""A model that is split by hand along tp trains as one process does: state, update, norm and checkpoints know slices.

The layers are the two of Megatron's MLP (Shoeybi et al. 2019, section 3): the first is cut by columns, the second by
rows.
"""

import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, OPTIMIZERS, assert_moved, batches_of, dense_data, per_sample
from meshes import on_mesh
from world import World, exact_arrays, flat_bytes, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.backends import differentiable
from hvdtrain.runtime.placement import Placement, place

HIDDEN, CLASSES = 24, 3
TOLERANCE = {"float32": 1e-6, "float64": 1e-9}


class SplitMLP(keras.Model):
    """Two dense layers, cut among the ranks of `group`."""

    def __init__(self, group: Any, dtype: str, *, drop: str = "") -> None:
        super().__init__(dtype=dtype, name="split_mlp")
        self.group, self.drop = group, drop
        self.part = slice(group.index * HIDDEN // group.size, (group.index + 1) * HIDDEN // group.size)

    def build(self, shape: Any) -> None:
        values = dict(zip(("k1", "b1", "k2", "b2"), whole_weights(self.dtype), strict=True))
        boxes = {
            "k1": (slice(0, 6), self.part),
            "b1": (self.part,),
            "k2": (self.part, slice(0, CLASSES)),
            "b2": (slice(0, CLASSES),),
        }
        for name, box in boxes.items():
            mine = values[name][box]
            variable = self.add_weight(shape=mine.shape, initializer=lambda shape, dtype=None, m=mine: m, name=name)
            setattr(self, name, variable)
            if name != "b2":
                place(variable, Placement(values[name].shape, box, ("tp",) if self.group.size > 1 else ()))

    def call(self, x: Any) -> Any:
        if self.drop != "copy":
            x = differentiable.copy_to(x, self.group, name="mlp/in")
        y = tf.tanh(tf.matmul(x, self.k1.value) + self.b1.value)
        z = tf.matmul(y, self.k2.value)
        if self.drop != "sum":
            z = differentiable.sum_from(z, self.group, name="mlp/out")
        return z + self.b2.value


def whole_weights(dtype: str) -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = [(6, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,)]
    return [(0.4 * rng.standard_normal(shape)).astype(dtype) for shape in shapes]


def whole_model(dtype: str) -> keras.Model:
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6,), dtype=dtype),
            layers.Dense(HIDDEN, activation="tanh", dtype=dtype),
            layers.Dense(CLASSES, dtype=dtype),
        ]
    )
    model.set_weights(whole_weights(dtype))
    return model


def trained(mesh: World, dtype: str, optimizer: Any, *, drop: str = "", **options: Any) -> hvdtrain.Trainer:
    model = SplitMLP(mesh.backend.along("tp"), dtype, drop=drop)
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=mesh.backend, **options)
    fit = {"batch": 16, "epochs": 4, "shuffle": False, "verbose": False, "log_every": 1 if options else 10}
    trainer.fit(dense_data(dtype), **fit)
    return trainer


def gathered(trainer: hvdtrain.Trainer) -> list[np.ndarray]:
    """Return the whole weights."""
    group = trainer.backend.along("tp")
    k1, b1, k2, b2 = (tf.convert_to_tensor(v) for v in trainer.model.get_weights())
    whole = [
        tf.transpose(group.all_gather(tf.transpose(k1), name="whole/k1")),
        group.all_gather(b1, name="whole/b1"),
        group.all_gather(k2, name="whole/k2"),
        b2,
    ]
    return [value.numpy() for value in whole]


def trained_alone(dtype: str, optimizer: str, clip_norm: float | None) -> list[np.ndarray]:
    clip = lambda gradients: tf.clip_by_global_norm(gradients, clip_norm)[0] if clip_norm else gradients  # noqa: E731
    batches = batches_of(*dense_data(dtype))
    weights = plain_training(whole_model(dtype), OPTIMIZERS[optimizer](), per_sample, batches, clip)
    assert_moved(weights, whole_weights(dtype))
    return weights


def error_of(mesh: World, dtype: str, optimizer: str, *, expected_clip_norm: float | None = None, **more: Any) -> float:
    weights = gathered(trained(mesh, dtype, OPTIMIZERS[optimizer](), **more))
    if not more.get("drop"):
        assert mesh.same_everywhere(flat_bytes(weights)), "the ranks hold different models"
    return relative_error(weights, mesh.reference(trained_alone, dtype, optimizer, expected_clip_norm))


def layouts(world: World) -> list[str]:
    return ["tp=2", "tp=4"] if world.size == 4 else [f"tp={world.size}"]


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_a_model_split_by_hand_trains_as_one_process_does(world: World) -> None:
    for axes in layouts(world):
        with on_mesh(world, axes) as mesh:
            for optimizer, dtype in (("adam", "float64"), ("sgd", "float32")):
                error = error_of(mesh, dtype, optimizer)
                assert error <= TOLERANCE[dtype], f"{axes} {optimizer} {dtype}: {error:.2e}"


@worlds("mpirun-2", "gloo-2", "gloo-4", extended=True)
def check_the_comparison_notices_a_collective_that_is_missing(world: World) -> None:
    with on_mesh(world, layouts(world)[0]) as mesh:
        # Left on, the check for ranks that drift apart would end the training before the comparison.
        assert error_of(mesh, "float64", "sgd", drop="sum", desync_every=0) > 1e-3
        # The gradient of the input is of no use to the first layer: what is missing shows behind another one only.
        x = tf.constant(dense_data("float64")[0][:4])
        gradients = []
        for drop in ("", "copy"):
            model = SplitMLP(mesh.backend.along("tp"), "float64", drop=drop)
            with tf.GradientTape() as tape:
                tape.watch(x)
                total = tf.reduce_sum(model(x) ** 2)
            gradients.append(tape.gradient(total, x).numpy())
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(whole_model("float64")(x) ** 2)
        right = tape.gradient(total, x).numpy()
        assert np.abs(gradients[0] - right).max() < 1e-12
        assert np.abs(gradients[1] - right).max() > 1e-3


@worlds("mpirun-2", extended=True)
@exact_arrays()
def check_clipping_is_by_the_norm_of_the_whole_gradient(world: World) -> None:
    bound = 1 / 16  # exact in the precision of a loss scale
    for axes in layouts(world):
        with on_mesh(world, axes) as mesh:
            error = error_of(mesh, "float64", "sgd", expected_clip_norm=bound, clip_norm=bound)
            assert error <= 1e-9, f"{axes}: {error:.2e}"
            assert error_of(mesh, "float64", "sgd", clip_norm=bound) > 1e-3, "nothing was clipped"


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-4", extended=True)
def check_slices_are_saved_and_restored_in_any_layout(world: World) -> None:
    for axes in layouts(world):
        with on_mesh(world, axes) as mesh:
            folder = world.folder / f"mesh-{axes}"
            trainer = trained(mesh, "float64", keras.optimizers.Adam(0.01))
            saved = gathered(trainer)
            trainer.save(folder)
            for other in ["dp=-1", *layouts(world)]:
                with on_mesh(world, other) as again:
                    model = SplitMLP(again.backend.along("tp"), "float64")
                    model.build(None)
                    resumed = hvdtrain.Trainer(model, keras.optimizers.Adam(0.01), CROSS_ENTROPY, backend=again.backend)
                    resumed.fit(dense_data("float64"), batch=16, epochs=1, verbose=False)
                    resumed.restore(folder)
                    found = gathered(resumed)
                    assert all((a == b).all() for a, b in zip(found, saved, strict=True)), f"{axes} -> {other}"
            world.gather(b"")
            if world.rank == 0:
                shutil.rmtree(folder)
