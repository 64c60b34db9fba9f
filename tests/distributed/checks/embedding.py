"""Tables that ranks have divided among them train as one process with whole tables does."""

import shutil
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from builders import OPTIMIZERS, TOLERANCE, assert_moved, per_sample
from checks.experts import whole
from meshes import alone, on_mesh
from world import World, computing_in, flat_bytes, moved, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.layers import embedding
from hvdtrain.layers.embedding import ShardedEmbedding
from hvdtrain.models.dlrm import build

SAMPLES, BATCH, EPOCHS = 67, 16, 4  # four full batches and one of 3 samples, of which a rank of 4 has none: 20 steps
ROWS, DIM, BOUND = 11, 8, 0.5
SHARDINGS = ("table", "row", "column")


def data() -> tuple[np.ndarray, np.ndarray]:
    # 11 rows for 335 lookups, several in a sample: rows are asked for twice, by one rank and by several.
    rng = np.random.default_rng(4)
    return rng.integers(0, ROWS, (SAMPLES, 5)).astype("int32"), rng.integers(0, 3, SAMPLES)


def batches_of(x: Any, y: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    cut = lambda i: tf.nest.map_structure(lambda a: a[i : i + BATCH], x)  # noqa: E731
    return [(cut(i), y[i : i + BATCH]) for i in range(0, SAMPLES, BATCH)] * EPOCHS


def model_of(dtype: str, table: Any) -> keras.Model:
    keras.utils.set_random_seed(11)
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Flatten(dtype=dtype)(table(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, dtype=dtype)(x))


def sharded(dtype: str, sharding: Any) -> keras.Model:
    return model_of(dtype, ShardedEmbedding(ROWS, DIM, sharding, owner=1, bound=BOUND, seed=7, dtype=dtype))


def trained(mesh: World, model: keras.Model, optimizer: Any, x: Any, y: np.ndarray, loss: Any) -> hvdtrain.Trainer:
    trainer = hvdtrain.Trainer(model, optimizer, loss, backend=mesh.backend)
    trainer.fit((x, y), batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=False, log_every=1)
    return trainer


def undivided(dtype: str) -> keras.Model:
    draw = keras.initializers.RandomUniform(-BOUND, BOUND, seed=7)
    return model_of(dtype, keras.layers.Embedding(ROWS, DIM, embeddings_initializer=draw, dtype=dtype))


def trained_alone(dtype: str, optimizer: str) -> list[np.ndarray]:
    model = undivided(dtype)
    start = [np.array(w) for w in model.get_weights()]
    weights = plain_training(model, OPTIMIZERS[optimizer](), per_sample, batches_of(*data()))
    assert_moved(weights, start)
    return weights


def layouts(world: World) -> list[str]:
    return ["dp=2,ep=2"] if world.size == 4 else ["ep=2"]


@worlds("mpirun-2", "gloo-4", extended=True)
def check_divided_tables_train_as_whole_ones(world: World) -> None:
    # Four ranks add up what two have, and the stricter precision shows that.
    for dtype, optimizer in (("float64", "adam"), ("float32", "sgd"))[: 1 if world.size == 4 else 2]:
        with computing_in(dtype):
            model, expected = undivided(dtype), world.reference(trained_alone, dtype, optimizer)
        model.set_weights(expected)
        for axes in layouts(world):
            for sharding in SHARDINGS if dtype == "float64" else SHARDINGS[1:2]:
                with on_mesh(world, axes) as mesh, computing_in(dtype):
                    trainer = trained(mesh, sharded(dtype, sharding), OPTIMIZERS[optimizer](), *data(), per_sample)
                    weights = whole(trainer.model, mesh)
                    error = relative_error(weights, expected)
                    assert error <= TOLERANCE[dtype], f"{sharding} {axes} {optimizer} {dtype}: {error:.2e}"
                    assert mesh.same_everywhere(flat_bytes(weights)), "the ranks hold different models"
                    predicted = trainer.predict(data()[0], batch=BATCH)
                    assert relative_error([predicted], [np.array(model(data()[0]))]) <= 10 * TOLERANCE[dtype]


@worlds("mpirun-2", extended=True)
def check_the_comparison_notices_gradients_that_stay(world: World) -> None:
    expected = world.reference(trained_alone, "float64", "sgd")
    send = embedding.send_rows
    embedding.send_rows = lambda x, *others, name: send(tf.stop_gradient(x), *others, name=name)
    try:
        with on_mesh(world, "ep=-1") as mesh:
            trainer = trained(mesh, sharded("float64", "row"), OPTIMIZERS["sgd"](), *data(), per_sample)
            assert relative_error(whole(trainer.model, mesh), expected) > 1e-3
    finally:
        embedding.send_rows = send


def clicks() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(5)
    inputs = {
        "numeric": rng.standard_normal((SAMPLES, 4)).astype("float32"),
        "categorical": rng.integers(0, 30, (SAMPLES, 3)).astype("int32"),
    }
    return inputs, rng.integers(0, 2, SAMPLES)


def click_loss(targets: Any, odds: Any) -> tf.Tensor:
    targets = tf.reshape(tf.cast(targets, odds.dtype), [-1, 1])
    return keras.losses.binary_crossentropy(targets, odds, from_logits=True)


@worlds("mpirun-2", extended=True)
def check_dlrm_with_divided_tables_is_dlrm(world: World) -> None:
    """Three tables on two ranks; and what was saved goes on by rows, and whole."""
    shape, sizes = {"numeric": (4,), "categorical": (3,)}, {"rows": 9, "dim": 8, "width": 6, "depth": 1}
    with alone():
        model = build(shape, 2, 0, **sizes)
        start = [np.array(w) for w in model.get_weights()]
        weights = plain_training(model, keras.optimizers.Adam(0.01), click_loss, batches_of(*clicks()))
        expected = dict(zip((w.path for w in model.weights), weights, strict=True))
    assert moved(weights, start) >= 1e-2
    folder = world.folder / "dlrm"
    with on_mesh(world, layouts(world)[0]) as mesh:
        ours = build(shape, 2, 0, "table", **sizes)
        trainer = trained(mesh, ours, keras.optimizers.Adam(0.01), *clicks(), click_loss)
        found = dict(zip((w.path for w in ours.weights), whole(ours, mesh), strict=True))
        error = relative_error([found[path] for path in sorted(found)], [expected[path] for path in sorted(found)])
        assert error <= 1e-6, f"{error:.2e}"
        trainer.save(folder)
    for other in ("dp=-1", "ep=-1"):
        with on_mesh(world, other) as mesh:
            again = build(shape, 2, 0, "row", **sizes)
            resumed = hvdtrain.Trainer(again, keras.optimizers.Adam(0.01), click_loss, backend=mesh.backend)
            resumed.fit(clicks(), batch=BATCH, epochs=1, verbose=False, log_every=1)
            resumed.restore(folder)
            restored = dict(zip((w.path for w in again.weights), whole(again, mesh), strict=True))
            assert all((restored[path] == found[path]).all() for path in found), other
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)
