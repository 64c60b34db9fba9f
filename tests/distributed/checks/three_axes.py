"""Stages of a pipeline with two further axes: layers along tp or sequences along cp, and experts or replicas."""

from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from checks import context_pairs as sequences
from checks import hybrids
from checks.context_parallel import FIT, LOSS, WORDS, batches_of, gpt, sgd, tokens, values
from checks.long_pipelines import slice_of
from meshes import alone, on_mesh
from world import World, computing_in, flat_bytes, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.models import transformer as transformer
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.structure import structure_of
from hvdtrain.training.update_rules.zero import shards


@worlds("mpirun-8", extended=True)
@computing_in("float64")
def check_split_layers_and_experts_of_stages_train_as_one_process_does(world: World) -> None:
    """With averages of weights, microbatches, a bound on the norm, and divided slots and gradients."""
    expected = hybrids.Reference()
    options = {"clip_norm": hybrids.BOUND, "accumulate": 2, "zero": 2}
    for axes in ("pp=2,ep=2,tp=2", "pp=2,dp=2,tp=2"):
        with on_mesh(world, axes) as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
            parallelize = Parallelization(mesh.backend.along("tp"), hybrids.RULES, mesh.backend)
            build = partial(parallelize, hybrids.built, None)  # each stage begins with what its own ranks draw
            optimizer = hybrids.optimizer_of()
            trainer = hvdtrain.Trainer(build, optimizer, hybrids.LOSS, backend=mesh.backend, **options)
            trainer.fit(hybrids.data(), epochs=hybrids.EPOCHS, **hybrids.FIT)
            error = error_of(mesh, trainer, expected.model, expected.averages)
            assert error <= 1e-9, f"{axes}: {error:.2e}"


@worlds("mpirun-8", extended=True)
@computing_in("float64")
def check_slices_of_sequences_and_experts_of_stages_train_as_one_process_does(world: World) -> None:
    """The router's losses are over the tokens of all ranks, of which the last batch leaves some without any."""
    build = lambda: sequences.stacked(sequences.EXPERTS)  # noqa: E731
    with alone():
        reference = build()

        def loss(targets: Any, outputs: Any) -> tf.Tensor:
            return values(targets, outputs) + tf.add_n(reference.losses)

        expected = sequences.trained_alone(reference, loss)
    with on_mesh(world, "pp=2,cp=2,ep=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        split = lambda: hvdtrain.parallelize(build)  # noqa: E731
        options = {"clip_norm": sequences.BOUND, "zero": 1}
        trainer = hvdtrain.Trainer(split, sgd(), LOSS, backend=mesh.backend, **options)
        trainer.fit(sequences.data(), **FIT)
        error = error_of(mesh, trainer, reference, expected)
        assert error <= 1e-9, f"{error:.2e}"


@worlds("mpirun-8", extended=True)
def check_slices_of_sequences_in_split_layers_train_as_one_process_does(world: World) -> None:
    """Of our transformer, in stages and in replicas."""
    x, y = tokens()
    reference = gpt()
    clip = lambda gradients: tf.clip_by_global_norm(gradients, 0.5)[0]  # noqa: E731
    expected = plain_training(reference, sgd(), values, batches_of(x, y), clip)
    for axes in ("pp=2,cp=2,tp=2", "dp=2,cp=2,tp=2"):
        with on_mesh(world, axes) as mesh:
            build = partial(hvdtrain.parallelize, gpt, transformer.rules(WORDS, 2))
            trainer = hvdtrain.Trainer(build, sgd(), LOSS, backend=mesh.backend, clip_norm=0.5, zero=1)
            trainer.fit((x, y), **FIT)
            error = error_of(mesh, trainer, reference, expected)
            assert error <= 1e-6, f"{axes}: {error:.2e}"


@worlds("gloo-8", extended=True)
def check_tied_weights_of_stages_stay_equal_with_many_replicas(world: World) -> None:
    """To the last bit, with their slots: three addends or more are rounded in the order in which they are added up.

    And they are those of one process. Weights of tokens have sums of their own to round.
    """
    x, y = tokens()
    weights = np.random.default_rng(8).uniform(0.1, 2.0, x.shape).astype("float32")

    def shared() -> keras.Model:
        """Layers that are called again and again, as in ALBERT."""
        keras.utils.set_random_seed(5)
        table = keras.layers.ReversibleEmbedding(512, 64)
        blocks = [keras.layers.Dense(64, activation="tanh") for _ in range(3)]
        hidden = table(ids := keras.Input(x.shape[1:], dtype="int32"))
        for block in (*blocks, *blocks):
            hidden = keras.layers.LayerNormalization()(hidden + block(hidden))
        return keras.Model(ids, table(hidden, reverse=True))

    reference = shared()
    batches = batches_of(x, y)
    expected = plain_training(reference, sgd(), values, batches[: len(batches) // FIT["epochs"]])
    for axes, zero, data in (("pp=2,dp=4", 0, (x, y, weights)), ("pp=2,dp=2,cp=2", 1, (x, y))):
        with on_mesh(world, axes) as mesh:
            build = partial(hvdtrain.parallelize, shared)
            options = {"accumulate": 2, "zero": zero, "desync_every": 1}
            trainer = hvdtrain.Trainer(build, sgd(), LOSS, backend=mesh.backend, **options)
            trainer.fit(data, **{**FIT, "epochs": 1})
            mine = structure_of(trainer.model).by_path(trainer.model.weights)
            assert len(trainer.model.tied) == 7, "a table, and kernels and biases of three blocks"
            value = flat_bytes([mine[path].numpy() for path in trainer.model.tied])
            kinds = len(set(mesh.gather(value)))
            assert kinds == 1, f"{axes}: {kinds} kinds of tied weights"
            if len(data) == 2:
                error = error_of(mesh, trainer, reference, expected)
                assert error <= 1e-6, f"{axes}: {error:.2e}"


@worlds("mpirun-8", extended=True)
def check_experts_that_stages_share_train_as_one_process_does(world: World) -> None:
    """Replicas along ep hold different experts, which are not to be added up."""

    def shared() -> keras.Model:
        keras.utils.set_random_seed(6)
        experts = hvdtrain.MixtureOfExperts(8, 16, top_k=2, capacity_factor=None, balance_weight=0, z_weight=0)
        hidden = keras.layers.Embedding(WORDS, 16)(ids := keras.Input(tokens()[0].shape[1:], dtype="int32"))
        for _ in range(4):
            hidden = hidden + experts(keras.layers.LayerNormalization()(hidden))
        return keras.Model(ids, keras.layers.Dense(WORDS)(hidden))

    with alone():
        reference = shared()
        expected = plain_training(reference, sgd(), values, batches_of(*tokens()))
    for axes in ("pp=2,ep=4", "pp=2,dp=2,ep=2"):
        with on_mesh(world, axes) as mesh:
            trainer = hvdtrain.Trainer(shared, sgd(), LOSS, backend=mesh.backend, accumulate=2)
            trainer.fit(tokens(), **FIT)
            assert any(weight.expert_parallel for weight in trainer.model.tied.values()), "no experts are shared"
            error = error_of(mesh, trainer, reference, expected)
            assert error <= 1e-5, f"{axes}: {error:.2e}"


@worlds("gloo-8", extended=True)
def check_what_ranks_along_tp_hold_whole_stays_equal_with_many_replicas(world: World) -> None:
    """To the last bit, with its slots: the exchange among replicas behind a sum over tp rounds it anew."""
    build = partial(hvdtrain.parallelize, gpt, transformer.rules(WORDS, 2))
    for axes, zero in (("dp=4,tp=2", 0), ("dp=2,cp=2,tp=2", 1)):
        with on_mesh(world, axes) as mesh:
            options = {"accumulate": 2, "zero": zero, "desync_every": 1}
            trainer = hvdtrain.Trainer(build, keras.optimizers.Adam(1e-3), LOSS, backend=mesh.backend, **options)
            trainer.fit(tokens(), **{**FIT, "epochs": 1})
            whole = [v.numpy() for v in trainer.model.weights if placement_of(v) is None]
            kinds = len(set(mesh.gather(flat_bytes(whole))))
            assert len(whole) > 1, "norms at least"
            assert kinds == 1, f"{axes}: {kinds} kinds of what each holds whole"


def error_of(mesh: World, trainer: hvdtrain.Trainer, model: Any, expected: Sequence[np.ndarray]) -> float:
    """Compare what each rank holds with the same of the whole model; return the largest difference of all ranks."""
    whole = dict(zip(structure_of(model).by_path(model.weights), expected, strict=True))
    mine = structure_of(trainer.model).by_path(trainer.model.weights)
    wanted = [slice_of(whole[path], placement_of(variable)) for path, variable in mine.items()]
    error = relative_error([variable.numpy() for variable in mine.values()], wanted)
    held = [text.decode().split("\n") for text in mesh.gather("\n".join(mine).encode())]
    assert set().union(*held) == set(whole), "a weight is on no rank"
    if "pp" in mesh.backend.axes:
        assert max(map(len, held)) < len(whole), "a rank holds layers of all stages"
    return max(float(text) for text in mesh.gather(str(error).encode()))
