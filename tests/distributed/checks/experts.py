"""Experts that ranks have divided among them train as one process with all of them does."""

import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, OPTIMIZERS, TOLERANCE, assert_moved, per_sample
from meshes import alone, on_mesh
from world import World, computing_in, flat_bytes, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import slice_bounds
from hvdtrain.layers import experts
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.runtime.placement import Placement, place, placement_of

SAMPLES, BATCH, EPOCHS = 67, 16, 4  # four full batches and one of 3 samples, of which a rank of 4 has none: 20 steps
EXPERTS, WIDTH, LENGTH = 4, 6, 3


def data(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(3)
    return rng.standard_normal((SAMPLES, LENGTH, WIDTH)).astype(dtype), rng.integers(0, 3, SAMPLES)


def batches(dtype: str) -> list[tuple[np.ndarray, np.ndarray]]:
    x, y = data(dtype)
    return [(x[i : i + BATCH], y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS


def model_of(dtype: str, **options: Any) -> keras.Model:
    """Return a model with layers before and behind the experts, each of the same values on every rank."""
    keras.utils.set_random_seed(11)
    options = {"top_k": 2, "capacity_factor": None, "balance_weight": 0.05, "z_weight": 0.01, **options}
    x = inputs = keras.Input((LENGTH, WIDTH), dtype=dtype)
    x = keras.layers.Dense(WIDTH, dtype=dtype)(x)
    x = x + MixtureOfExperts(EXPERTS, 8, seed=5, dtype=dtype, name="experts", **options)(x)
    x = keras.layers.Flatten(dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype=dtype)(x))


def whole(model: keras.Model, mesh: World) -> list[np.ndarray]:
    """Return the whole weights, those of all experts together."""
    weights = []
    for number, weight in enumerate(model.weights):
        value, placement = tf.convert_to_tensor(weight.value), placement_of(weight)
        for axis in () if placement is None else placement.axes:
            shape = placement.global_shape
            dim = next((d for d in range(len(shape)) if value.shape[d] != shape[d]), 0)  # one may hold all of it
            order = [dim, *(d for d in range(len(shape)) if d != dim)]
            cut = mesh.backend.along(axis).all_gather(tf.transpose(value, order), name=f"whole/{number}/{axis}")
            value = tf.transpose(cut, [order.index(d) for d in range(len(shape))])
        weights.append(value.numpy())
    return weights


def trained(
    mesh: World, model: keras.Model, dtype: str, optimizer: Any, *, epochs: int = EPOCHS, **options: Any
) -> hvdtrain.Trainer:
    trainer = hvdtrain.Trainer(model, optimizer, CROSS_ENTROPY, backend=mesh.backend, **options)
    # Measuring each step saves a graph, and half a second.
    trainer.fit(data(dtype), batch=BATCH, epochs=epochs, shuffle=False, verbose=False, log_every=1)
    return trainer


def trained_alone(dtype: str, optimizer: str) -> list[np.ndarray]:
    """Train a process by itself on whole batches, with the losses that the layer adds."""
    with alone():
        model = model_of(dtype)

        def loss(targets: Any, outputs: Any) -> tf.Tensor:
            return per_sample(targets, outputs) + tf.add_n(model.losses)

        start = [np.array(w) for w in model.get_weights()]
        weights = plain_training(model, OPTIMIZERS[optimizer](), loss, batches(dtype))
    assert_moved(weights, start)
    return weights


def layouts(world: World) -> list[str]:
    return ["dp=2,ep=2", "ep=2,tp=2"] if world.size == 4 else ["ep=2", "dp=2"]


@worlds("mpirun-2", extended=True)
def check_experts_train_as_in_one_process(world: World) -> None:
    # Four ranks add up what two have, and the stricter precision shows that.
    compare_with_one_process(world, "float64", "adam")
    if world.size < 4:
        compare_with_one_process(world, "float32", "sgd")


def compare_with_one_process(world: World, dtype: str, optimizer: str) -> None:
    with computing_in(dtype):
        expected = world.reference(trained_alone, dtype, optimizer)
        with alone():
            model = model_of(dtype)
            model.set_weights(expected)
        for axes in layouts(world) if dtype == "float64" else layouts(world)[:1]:
            with on_mesh(world, axes) as mesh:
                options = {"recompute": dtype == "float32"}
                trainer = trained(mesh, model_of(dtype), dtype, OPTIMIZERS[optimizer](), **options)
                weights = whole(trainer.model, mesh)
                error = relative_error(weights, expected)
                assert error <= TOLERANCE[dtype], f"{axes} {optimizer} {dtype}: {error:.2e}"
                assert mesh.same_everywhere(flat_bytes(weights)), "the ranks hold different models"
                if dtype == "float64":
                    predicted = trainer.predict(data(dtype)[0], batch=BATCH)
                    with alone():
                        right = np.array(model(data(dtype)[0]))
                    assert relative_error([predicted], [right]) < 1e-9, (predicted[:3], right[:3])
                    outcome = trainer.evaluate(data(dtype), batch=BATCH, verbose=False, return_dict=True)
                    mean = float(tf.reduce_mean(per_sample(data(dtype)[1], right)))
                    assert abs(outcome["loss"] - mean) < 1e-9 * mean


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_capacity_is_that_of_each_ranks_tokens(world: World) -> None:
    """The reference gives each part of a batch its own capacity, as ranks do theirs."""
    options = {"capacity_factor": 0.5, "balance_weight": 0.0, "top_k": 1}
    with alone():
        model, optimizer = model_of("float64", **options), keras.optimizers.SGD(0.1, momentum=0.9)
        for x, y in batches("float64"):
            with tf.GradientTape() as tape:
                loss = 0.0
                for rank in range(world.size):
                    begin, end, has_samples = slice_bounds(len(x), rank, world.size)
                    if has_samples:
                        out = model(x[begin:end], training=True)
                        part = tf.reduce_sum(per_sample(y[begin:end], out)) + (end - begin) * tf.add_n(model.losses)
                        loss += part / len(x)
            sources = [v.value for v in model.trainable_variables]
            optimizer.apply(tape.gradient(loss, sources), model.trainable_variables)
    expected = [np.array(w) for w in model.get_weights()]
    dropped = float(model.get_layer("experts").counts.dropped)
    with on_mesh(world, "ep=-1") as mesh:
        ours = model_of("float64", **options)
        trainer = trained(mesh, ours, "float64", keras.optimizers.SGD(0.1, momentum=0.9), clip_norm=1e9)
        error = relative_error(whole(ours, mesh), expected)
        assert error <= 1e-9, f"{error:.2e}"
        assert dropped > 100
        assert trainer is not None


@worlds("mpirun-2", extended=True)
def check_experts_that_were_built_before_init_are_refused(world: World) -> None:
    """They hold all weights, and know of no ranks to balance their load with."""
    for axes, shared in (("ep=-1", "ep"), ("dp=-1", "dp, cp, ep")):
        with alone():
            model = model_of("float64")
        words = f"{world.size} ranks share it along {shared}. Build the model after init."
        with on_mesh(world, axes) as mesh, refused(words, ConfigError):
            trained(mesh, model, "float64", keras.optimizers.SGD(0.1))


@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_the_comparison_notices_what_is_missing(world: World) -> None:
    expected = world.reference(trained_alone, "float64", "sgd")

    def error_of(change: Any) -> float:
        with on_mesh(world, "ep=-1") as mesh:
            model = model_of("float64")
            change(model.get_layer("experts"))
            trained(mesh, model, "float64", OPTIMIZERS["sgd"]())
            return relative_error(whole(model, mesh), expected)

    def balance_alone(layer: Any) -> None:
        layer._replicas = None

    def reduce_over_all(layer: Any) -> None:
        for variable in (layer.kernel_in, layer.kernel_out):
            here = placement_of(variable)
            place(variable, Placement(here.global_shape, here.box, here.axes))

    def keep_gradients(layer: Any) -> None:
        exchange = experts.exchange_parts

        def one_way(x: Any, group: Any, cut: int, joined: int, *, name: str) -> Any:
            moved = exchange(tf.stop_gradient(x), group, cut, joined, name=name)
            return moved + tf.reshape(x - tf.stop_gradient(x), tf.shape(moved))

        # Within the layer's own calls only.
        call = layer._outputs

        def outputs(buffers: Any, name: str) -> Any:
            experts.exchange_parts = one_way
            try:
                return call(buffers, name)
            finally:
                experts.exchange_parts = exchange

        layer._outputs = outputs

    for change in (balance_alone, reduce_over_all, keep_gradients):
        error = error_of(change)
        assert error > 1e-4, f"{change.__name__}: {error:.2e}"


@worlds("gloo-4")
@worlds("mpirun-2", extended=True)
@computing_in("float64")
def check_experts_are_saved_and_restored_in_any_layout(world: World) -> None:
    folder = world.folder / "experts"
    with on_mesh(world, layouts(world)[0]) as mesh:
        trainer = trained(mesh, model_of("float64"), "float64", keras.optimizers.Adam(0.01), epochs=1)
        trainer.save(folder)
        saved = whole(trainer.model, mesh)
    for axes in ("dp=-1", "ep=-1"):
        with on_mesh(world, axes) as mesh:
            resumed = trained(mesh, model_of("float64"), "float64", keras.optimizers.Adam(0.01), epochs=2)
            assert any((a != b).any() for a, b in zip(whole(resumed.model, mesh), saved, strict=True))
            resumed.restore(folder)
            found = whole(resumed.model, mesh)
            assert all((a == b).all() for a, b in zip(found, saved, strict=True)), axes
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)


@worlds("mpirun-2", extended=True)
def check_experts_that_ranks_do_not_divide_are_refused(world: World) -> None:
    words = f"{world.size + 1} experts of the layer 'experts', {world.size} ranks"
    with on_mesh(world, "ep=-1"), refused(words, ConfigError):
        MixtureOfExperts(world.size + 1, 8, name="experts").build((None, 4))
