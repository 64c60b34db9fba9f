"""Pipelines with stages between the first and the last, and pipelines beside one another."""

from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf
from builders import CROSS_ENTROPY, OPTIMIZERS, per_sample
from checks import tensor_parallel as tensors
from checks.pipelines import TOLERANCE, assert_parity, batches, data, error_of, model_of, trained
from meshes import on_mesh
from world import World, computing_in, plain_training, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.parallel.tensor.parallelize import Parallelization
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.named_tensors import NamedTensor, placed_tensor
from hvdtrain.state.structure import structure_of
from hvdtrain.training.update_rules.zero import shards

BOUND = 0.05
"""On the norm of the gradient."""


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_four_stages_and_replicas_of_two_train_as_one_process_does(world: World) -> None:
    with on_mesh(world, "pp=4") as mesh:
        assert_parity(mesh, "float64", "sgd", tied=True)
    folder = world.folder / "stages_of_replicas"
    with on_mesh(world, "pp=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        options = {"accumulate": 2, "tied": True, "clip_norm": BOUND, "zero": 1}
        trainer = assert_parity(mesh, "float64", "sgd", loss=per_sample, **options)  # a user's own loss
        trainer.save(folder)
        world.gather(b"")
    with on_mesh(world, "dp=-1") as mesh:
        restored = hvdtrain.Trainer(
            model_of("float64", tied=True), OPTIMIZERS["sgd"](), CROSS_ENTROPY, backend=mesh.backend
        )
        restored.fit(data(), batch=16, epochs=1, verbose=False)
        restored.restore(folder)
    assert_slices(tensors_of(trainer), tensors_of(restored))


def tensors_of(trainer: Any) -> dict[str, NamedTensor]:
    """Return weights and slots by path."""
    model = structure_of(trainer.model).by_path(trainer.model.weights)
    slots = {path: each for path, each in trainer.rule.named_tensors().items() if "momentum" in path}
    return {**{path: placed_tensor(weight) for path, weight in model.items()}, **slots}


def assert_slices(mine: dict[str, NamedTensor], whole: dict[str, NamedTensor]) -> None:
    assert any(not tensor.replicated for tensor in mine.values()), "nothing is sliced"
    for path, tensor in mine.items():
        wanted = np.reshape(whole[path].value.numpy(), tensor.global_shape)[tensor.slice]
        assert np.array_equal(np.ravel(tensor.value.numpy()), np.ravel(wanted)), path


@worlds("gloo-4", extended=True)
def check_stages_of_split_layers_train_as_one_process_does(world: World) -> None:
    """Two stages of two ranks each, with logits and embeddings of which each rank has a slice, and weights tied."""
    clip = lambda gradients: tf.clip_by_global_norm(gradients, 1 / 16)[0]  # noqa: E731
    with on_mesh(world, "pp=2,tp=2") as mesh:
        for name, dtype, transform, options in (
            ("tied", "float64", clip, {"clip_norm": 1 / 16, "accumulate": 2}),
            ("transformer", "float32", None, {"accumulate": 4, "recompute": True}),
        ):
            with computing_in(dtype):
                error = error_of_split(mesh, name, dtype, transform, **options)
            assert error <= TOLERANCE[dtype], f"{name}: {error:.2e}"


def error_of_split(mesh: World, name: str, dtype: str, transform: Any, **options: Any) -> float:
    """Train a case of the tensor parallel checks in stages and in one process, and compare what each rank holds."""
    (x, y), rate = tensors.data_of(name, dtype), tensors.RATES.get(name, 0.3)
    optimizers = [keras.optimizers.SGD(rate, momentum=0.9) for _ in range(2)]
    split = Parallelization(mesh.backend.along("tp"), tensors.CASES[name][1], mesh.backend)
    model = split(lambda: tensors.built(name, dtype), None)
    trainer = hvdtrain.Trainer(model, optimizers[0], tensors.LOSS, ["accuracy"], backend=mesh.backend, **options)
    trainer.fit((x, y), batch=tensors.BATCH, epochs=tensors.EPOCHS, shuffle=False, verbose=False, log_every=1)
    reference = tensors.built(name, dtype)
    batches = [(x[i : i + tensors.BATCH], y[i : i + tensors.BATCH]) for i in range(0, len(x), tensors.BATCH)]
    plain_training(reference, optimizers[1], per_sample, batches * tensors.EPOCHS, transform)
    expected = reference(x).numpy()
    assert np.abs(trainer.predict(x) - expected).max() <= 10 * TOLERANCE[dtype] * np.abs(expected).max(), name
    scores = trainer.evaluate((x, y), verbose=0, return_dict=True)
    assert abs(scores["loss"] - float(tf.reduce_mean(per_sample(y, expected)))) <= 1e-6
    assert abs(scores["accuracy"] - np.mean(expected.argmax(-1) == y)) <= 1e-6
    whole = structure_of(reference).by_path(reference.weights)
    mine = structure_of(trainer.model).by_path(trainer.model.weights)
    wanted = [slice_of(whole[path].numpy(), placement_of(variable)) for path, variable in mine.items()]
    error = relative_error([variable.numpy() for variable in mine.values()], wanted)
    return max(float(text) for text in mesh.gather(str(error).encode()))


def slice_of(whole: np.ndarray, placement: Any) -> np.ndarray:
    return whole if placement is None else whole[placement.box]


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_gradients_of_stages_are_slices_among_replicas(world: World) -> None:
    """ZeRO 2, with tied weights and penalties: each microbatch's gradients are added up as slices."""
    plain = penalized_model()
    expected = penalized_reference(plain)
    options = {"clip_norm": BOUND, "accumulate": 2, "pipeline_schedule": "interleaved", "virtual_stages": 2}
    with on_mesh(world, "pp=2") as mesh, mock.patch.object(shards, "SMALL_BYTES", 0):
        sgd = OPTIMIZERS["sgd"]()
        trainer = trained(mesh, penalized_model, sgd, zero=2, on_bad_step="skip", **options)
        error = error_of(mesh, trainer, expected, plain)
    assert error <= TOLERANCE["float64"], f"{error:.2e}"


def penalized_model() -> keras.Model:
    model = model_of("float64", tied=True)
    for name in ("dense0", "dense3"):
        model.get_layer(name).kernel.regularizer = keras.regularizers.L2(0.01)
    return model


def penalized_reference(model: keras.Model) -> list[np.ndarray]:
    def loss(targets: Any, outputs: Any) -> Any:
        return per_sample(targets, outputs) + tf.add_n(model.losses)

    return plain_training(model, OPTIMIZERS["sgd"](), loss, batches(), clipped)


def clipped(gradients: Any) -> Any:
    return tf.clip_by_global_norm(gradients, BOUND)[0]


@worlds("gloo-4", extended=True)
@computing_in("float64")
def check_a_pipeline_without_samples_adds_nothing(world: World) -> None:
    """The last batch has one sample, and one of two pipelines has none: its stages pass on what does not count."""
    x, y = (array[:17] for array in data())
    with on_mesh(world, "pp=2") as mesh:
        model, plain = model_of("float64"), model_of("float64")
        trainer = hvdtrain.Trainer(model, OPTIMIZERS["sgd"](), CROSS_ENTROPY, backend=mesh.backend, accumulate=2)
        trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False, log_every=1)
        expected = plain_training(plain, OPTIMIZERS["sgd"](), per_sample, [(x[:16], y[:16]), (x[16:], y[16:])] * 2)
        error = error_of(mesh, trainer, expected, plain)
        assert error <= 1e-9, f"{error:.2e}"
