"""Stages of a pipeline whose experts are divided among ranks along ep train as one process does."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, per_sample
from checks.long_pipelines import slice_of
from meshes import alone, on_mesh
from world import World, computing_in, moved, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.data.batch import split_bounds
from hvdtrain.layers.experts import MixtureOfExperts, expert_layers
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.structure import structure_of
from hvdtrain.training.pipelined.forward_backward import ScheduledRun
from hvdtrain.training.step.train_step import TrainStep

REPLICAS, BATCH, EPOCHS = 2, 16, 4
LENGTH, WIDTH, VOCABULARY = 5, 8, 11
BOUND = 0.5
BALANCED = {"top_k": 2, "capacity_factor": None, "balance_weight": 0.05, "z_weight": 0.01}
DROPPING = {"top_k": 1, "capacity_factor": 0.5, "balance_weight": 0.0, "z_weight": 0.01}


def model_of(**options: Any) -> keras.Model:
    """Blocks of which the second and the third have experts, with the same values on every rank."""
    keras.utils.set_random_seed(3)
    layers, kind = keras.layers, {"dtype": "float64"}
    tokens = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(VOCABULARY, WIDTH, embeddings_initializer="normal", name="embedding", **kind)(tokens)
    for number in range(4):
        y = layers.LayerNormalization(name=f"norm{number}", **kind)(x)
        if number in (1, 2):
            y = MixtureOfExperts(4, 6, seed=number, name=f"experts{number}", **kind, **options)(y)
        else:
            y = layers.Dense(WIDTH, activation="tanh", name=f"dense{number}", **kind)(y)
        x = layers.Add(name=f"add{number}", **kind)([x, y])
    return keras.Model(tokens, layers.Dense(VOCABULARY, name="head", **kind)(x))


def optimizer_of() -> Any:
    return keras.optimizers.SGD(0.3, momentum=0.9)


def data(samples: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(4)
    x = rng.integers(0, VOCABULARY, (samples, LENGTH)).astype("int32")
    return x, (3 * x + 1) % VOCABULARY


def shares(count: int, accumulate: int) -> Iterator[list[np.ndarray]]:
    """Yield the places of the samples of each microbatch, for each replica that has some."""
    length = BATCH // REPLICAS // accumulate
    bounds = [split_bounds(count, replica, REPLICAS) for replica in range(REPLICAS)]
    for number in range(-(-max(end - begin for begin, end in bounds) // length)):
        parts = [np.arange(begin, end)[number * length :][:length] for begin, end in bounds]
        yield [part for part in parts if len(part)]


class Reference:
    """One process with the whole model: experts see a microbatch of all replicas together, or that of each of them.

    Args:
        samples: of the data set.
        accumulate: microbatches of a batch.
        together: whether the replicas' tokens are routed together, as their loads are balanced; else by themselves, as
            capacity is that of a replica.
        options: of the layers of experts.
    """

    def __init__(self, samples: int, accumulate: int, *, together: bool, **options: Any) -> None:
        with alone():
            self.model = model = model_of(**options)
            start, optimizer, epochs = [np.array(w) for w in model.get_weights()], optimizer_of(), []
            optimizer.build(model.trainable_variables)
            specs = [tf.TensorSpec([None, LENGTH], dtype) for dtype in (tf.int32, tf.int32)]
            passes = tf.function(self._passes, input_signature=specs, autograph=False)
            x, y = data(samples)
            for _ in range(EPOCHS):
                for begin in range(0, samples, BATCH):
                    batch = x[begin : begin + BATCH], y[begin : begin + BATCH]
                    sums = []
                    for parts in shares(len(batch[0]), accumulate):
                        for part in [np.concatenate(parts)] if together else parts:
                            sums.append(passes(*(tf.constant(array[part], tf.int32) for array in batch)))
                    mean = [tf.add_n(each) / (len(batch[0]) * LENGTH) for each in zip(*sums, strict=True)]
                    optimizer.apply(tf.clip_by_global_norm(mean, BOUND)[0], model.trainable_variables)
                epochs.append([np.array(w) for w in model.get_weights()])
            self.after = epochs
            assert moved(epochs[-1], start) >= 1e-2
            self.dropped = sum(float(layer.counts.dropped) for layer in expert_layers(model))
            self.loss = float(tf.reduce_mean(per_sample(y, model(x))))

    def _passes(self, x: tf.Tensor, y: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            losses = per_sample(y, self.model(x, training=True))
            total = tf.reduce_sum(losses) + tf.cast(tf.size(losses), tf.float64) * tf.add_n(self.model.losses)
        gradients = tape.gradient(total, [v.value for v in self.model.trainable_variables])
        return [tf.convert_to_tensor(gradient) for gradient in gradients]

    def error_of(self, mesh: World, trainer: hvdtrain.Trainer, *, epochs: int = EPOCHS) -> float:
        """Compare what this rank holds with the same of the whole model; return the largest difference of all ranks."""
        whole = dict(zip(structure_of(self.model).by_path(self.model.weights), self.after[epochs - 1], strict=True))
        mine = structure_of(trainer.model).by_path(trainer.model.weights)
        wanted = [slice_of(whole[path], placement_of(variable)) for path, variable in mine.items()]
        error = relative_error([variable.numpy() for variable in mine.values()], wanted)
        return max(float(text) for text in mesh.gather(str(error).encode()))


def trained(mesh: World, samples: int, of_model: dict[str, Any], *, epochs: int = EPOCHS, **options: Any) -> Any:
    options = {"clip_norm": BOUND, "pipeline_stages": ("norm2",), **options}
    trainer = hvdtrain.Trainer(model_of(**of_model), optimizer_of(), CROSS_ENTROPY, backend=mesh.backend, **options)
    trainer.fit(data(samples), batch=BATCH, epochs=epochs, shuffle=False, verbose=False, log_every=1)
    return trainer


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_experts_of_stages_train_as_one_process_does(world: World) -> None:
    """Of the last batch one replica has a sample less than the other, and both have one microbatch for two ranks."""
    samples, folder = 39, world.folder / "expert_pipelines"
    reference = Reference(samples, 2, together=True, **BALANCED)
    with on_mesh(world, "pp=2,ep=2") as mesh:
        options = {"pipeline_schedule": "interleaved", "virtual_stages": 2, "accumulate": 2}
        trainer = trained(mesh, samples, BALANCED, pipeline_stages=("norm1", "norm2", "norm3"), **options)
        error = reference.error_of(mesh, trainer)
        assert error <= 1e-9, f"{error:.2e}"
        scores = trainer.evaluate(data(samples), batch=BATCH, verbose=False)
        assert abs(float(scores) - reference.loss) <= 1e-9 * reference.loss, (scores, reference.loss)
        trainer.save(folder)
        world.gather(b"")
    with on_mesh(world, "dp=2,ep=2") as mesh:
        other = hvdtrain.Trainer(model_of(**BALANCED), optimizer_of(), CROSS_ENTROPY, backend=mesh.backend)
        other.restore(folder)
        error = reference.error_of(mesh, other)
        assert error <= 1e-9, f"{error:.2e}"
    world.gather(b"")
    if world.rank == 0:
        shutil.rmtree(folder)


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_dropped_tokens_of_all_stages_are_counted(world: World) -> None:
    """Of the last batch one replica has nothing, and its stages serve the other's tokens alone.

    Those of the first stage are counted once, though it is called once more for the backward pass.
    """
    samples, seen = 33, []
    reference = Reference(samples, 1, together=False, **DROPPING)
    step = TrainStep.__call__

    def recorded(self: Any, batch: Any, *, measure: bool) -> Any:
        result = step(self, batch, measure=measure)
        seen.append({name: np.array(value) for name, value in self.recent_metrics().items()})
        return result

    with on_mesh(world, "pp=2,ep=2") as mesh, mock.patch.object(TrainStep, "__call__", recorded):
        trainer = trained(mesh, samples, DROPPING, recompute=True)
        error = reference.error_of(mesh, trainer)
        assert error <= 1e-9, f"{error:.2e}"
    assert reference.dropped > 100
    assert sum(figures["dropped_tokens"] for figures in seen) == reference.dropped
    assert all(abs(figures[f"expert_load_experts{n}"].sum() - 4) < 1e-5 for figures in seen for n in (1, 2))


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_recomputed_experts_without_samples_count_nothing(world: World) -> None:
    """Of the last batch one replica has nothing: its placeholder takes no part in the balance of the load."""
    reference = Reference(33, 1, together=True, **BALANCED)
    with on_mesh(world, "pp=2,ep=2") as mesh:
        error = reference.error_of(mesh, trained(mesh, 33, BALANCED, recompute=True))
        assert error <= 1e-9, f"{error:.2e}"


@contextmanager
def uncounted() -> Iterator[None]:
    """Let stages that are not told what their losses count take them for nothing."""
    seed_of = ScheduledRun._seed_of_added

    def nothing(run: Any, added: Any, packed: Any, part: Any) -> Any:
        return seed_of(run, added, 0.0 * packed, part)

    with mock.patch.object(ScheduledRun, "_seed_of_added", nothing):
        yield


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_training_goes_wrong_without_the_losses_of_earlier_stages(world: World) -> None:
    reference = Reference(16, 1, together=True, **BALANCED)
    with on_mesh(world, "pp=2,ep=2") as mesh, uncounted():
        trainer = trained(mesh, 16, BALANCED, pipeline_schedule="gpipe")
        error = reference.error_of(mesh, trainer)
        assert error > 1e-6, f"{error:.2e}"
