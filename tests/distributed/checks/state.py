"""The state on ranks that are not alike: names that Keras numbers differently, slices, folders that one rank sees."""

import json
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.training import CROSSENTROPY, classifier, samples
from world import World, flat_bytes, plain_training, refused, relative_error
from worlds import worlds

import hvdtrain
from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.restore import restore
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import box_shape
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan


def model_after_others(seed: int, others: int, *middle: Any) -> keras.Model:
    """Return a model whose layers Keras has numbered from `others` on."""
    keras.utils.clear_session(free_memory=False)
    for _ in range(others):
        keras.Sequential([keras.Input((5,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.BatchNormalization(), *middle]
    return keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(3)])


@worlds("mpirun-2", extended=True)
def check_ranks_that_built_other_models_before_train_together(world: World) -> None:
    model = model_after_others(0, 2 * world.rank, keras.layers.Dropout(0.1))
    names = world.gather(model.weights[0].path.encode())
    assert len(set(names)) == world.size, "Keras numbers them alike"
    metric = [keras.metrics.MeanIoU(3, sparse_y_pred=False) for _ in range(1 + world.rank)][-1]
    assert len(set(world.gather(metric.name.encode()))) == world.size, "Keras numbers them alike"
    trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(0.01), CROSSENTROPY, [metric], backend=world.backend)
    result = trainer.fit(samples(), batch=16, validation_data=samples(), verbose=False)
    assert world.same_everywhere(repr([*result.history.values()]).encode())
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    assert len(trainer.state.agreed_hash(world.backend)) == 64
    files = Checkpointer(world.folder / "numbered", backend=world.backend)
    files.save(1, trainer.state.named_tensors(), asdict(trainer.state.scalars))
    again = model_after_others(1, 5 + world.rank, keras.layers.Dropout(0.1))
    second = hvdtrain.Trainer(again, keras.optimizers.Adam(0.01), CROSSENTROPY, backend=world.backend)
    second.restore(files.find())
    assert flat_bytes(again.get_weights()) == flat_bytes(model.get_weights())
    assert [np.array(v).tolist() for v in second.optimizer.variables] == [
        np.array(v).tolist() for v in trainer.optimizer.variables
    ]


@worlds("mpirun-2", extended=True)
def check_own_loops_match_variables_whatever_keras_calls_them(world: World) -> None:
    model = model_after_others(world.rank, 3 * world.rank)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvdtrain.broadcast_variables([*model.weights, *optimizer.variables])
    assert world.same_everywhere(flat_bytes(model.get_weights()))
    x, y = samples(8 * world.size)
    mine = slice(8 * world.rank, 8 * world.rank + 8)
    for groups in (0, [model.trainable_variables[:3], model.trainable_variables[3:5]]):
        with hvdtrain.DistributedGradientTape(groups=groups) as tape:
            loss = CROSSENTROPY(y[mine], model(x[mine], training=False))
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    assert world.same_everywhere(flat_bytes(model.get_weights()))


@worlds("mpirun-2", extended=True)
def check_layers_that_are_unfrozen_between_two_fits(world: World) -> None:
    def per_sample(targets: Any, outputs: Any) -> tf.Tensor:
        return keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)

    x, y = samples(48)
    batches = [(x[at : at + 16], y[at : at + 16]) for at in range(0, 48, 16)]
    for options in ({}, {"local_steps": 1}):
        ours, theirs = classifier(0), classifier(0)
        trainer = hvdtrain.Trainer(ours, keras.optimizers.SGD(0.1), per_sample, backend=world.backend, **options)
        for trainable in (False, True, False):
            ours.layers[0].trainable = theirs.layers[0].trainable = trainable
            trainer.fit((x, y), batch=16, epochs=2, shuffle=False, verbose=False)
            expected = plain_training(theirs, keras.optimizers.SGD(0.1), per_sample, batches * 2)
            assert world.same_everywhere(flat_bytes(ours.get_weights()))
            assert relative_error(ours.get_weights(), expected) <= 1e-6, (options, trainable)
        assert (trainer.state.scalars.step, trainer.state.scalars.epoch) == (18, 6)


@worlds("mpirun-2", extended=True)
def check_an_epoch_that_is_resumed_reports_all_of_it(world: World) -> None:
    def trained(steps: int, resume: bool, **options: Any) -> Any:
        trainer = hvdtrain.Trainer(classifier(0), "sgd", CROSSENTROPY, ["accuracy"], backend=world.backend)
        data = training_data(samples(), world.backend, batch=16, seed=5, shuffle=True, steps_per_epoch=None)
        trainer.build(data)
        if resume:
            trainer.restore(files.find())
        return trainer.train(data, Plan(steps), callbacks=[keras.callbacks.TerminateOnNaN()], **options)

    def save(state: Any) -> None:
        if state.scalars.step == 6:
            files.save(6, state.named_tensors(), asdict(state.scalars))

    files = Checkpointer(world.folder / "within", backend=world.backend)
    whole = trained(8, resume=False)
    trained(6, resume=False, save=save)
    resumed = trained(8, resume=True)
    assert abs(resumed.train_loss - whole.train_loss) <= 1e-6 * whole.train_loss
    assert resumed.history["accuracy"][-1] == whole.history["accuracy"][-1]


WHOLE = {
    "flat": np.arange(10, dtype="float32"),
    "rows": np.arange(7 * 3, dtype="float64").reshape(7, 3),
    "half": np.arange(24).reshape(4, 6).astype(tf.bfloat16.as_numpy_dtype),
    "flags": np.arange(9) % 2 == 0,
}


def slices_of(rank: int, size: int, *, filled: bool) -> dict[str, NamedTensor]:
    """Return a rank's slices along dim 0, padded to one length, and a tensor that all hold."""
    tensors = {"alike": replicated_tensor(tf.Variable([1.0, 2.0] if filled else [0.0, 0.0]))}
    for name, value in WHOLE.items():
        piece = -(-len(value) // size)
        part = slice(min(len(value), rank * piece), min(len(value), (rank + 1) * piece))
        box = (part, *(slice(0, n) for n in value.shape[1:]))
        held = np.zeros((piece, *value.shape[1:]), value.dtype)
        if filled:
            held[: part.stop - part.start] = value[part]
        tensors[name] = NamedTensor(tf.Variable(held), value.shape, box, replicated=False)
    return tensors


def holds_its_slices(tensors: dict[str, NamedTensor]) -> bool:
    parts = {name: tensor.value.numpy()[: box_shape(tensor.slice)[0]] for name, tensor in tensors.items()}
    alike = parts.pop("alike")
    expected = {name: WHOLE[name][tensors[name].slice] for name in parts}
    return alike.tolist() == [1.0, 2.0] and all((parts[name] == expected[name]).all() for name in parts)


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_slices_are_saved_by_all_and_restored_by_any_number(world: World) -> None:
    files = Checkpointer(world.folder / "slices", backend=world.backend)
    path = files.save(3, slices_of(world.rank, world.size, filled=True), {"step": 3})
    if world.rank == 0:
        manifest = json.loads((path / "index.json").read_text())
        assert len(manifest["files"]) == world.size
    restored = slices_of(world.rank, world.size, filled=False)
    assert restore(files.find(), restored, world.backend) == {"step": 3}
    assert holds_its_slices(restored)
    # Each rank by itself, as one of another number of ranks.
    alone = slices_of(0, 1, filled=False)
    restore(path, alone, Checkpointer(path).ranks)
    assert holds_its_slices(alone)
    # A rank that does not see the folder.
    sent = slices_of(world.rank, world.size, filled=False)
    restore(path if world.rank == 0 else world.folder / "nothing", sent, world.backend)
    assert holds_its_slices(sent)


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_a_failure_on_one_rank_is_that_of_all(world: World) -> None:
    files = Checkpointer(world.folder / "failing", keep=1, backend=world.backend)
    files.save(1, slices_of(world.rank, world.size, filled=True), {})
    broken = slices_of(world.rank, world.size, filled=True)
    if world.rank == world.size - 1:
        broken["rows"] = broken["rows"]._replace(slice=(slice(0, 1), slice(0, 3)))
    if world.size > 1:
        with refused("Of rows the ranks hold", CheckpointError):
            files.save(2, broken, {})
    restored = slices_of(world.rank, world.size, filled=False)
    restore(files.find(), restored, world.backend)
    assert holds_its_slices(restored)


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_all_ranks_go_on_from_the_newest_good_checkpoint(world: World) -> None:
    files = Checkpointer(world.folder / "damaged", backend=world.backend)
    for step in (1, 2):
        files.save(step, slices_of(world.rank, world.size, filled=True), {"step": step})
    if world.rank == 0:
        # The slice of the last rank, which the primary would not have to read.
        file = world.folder / "damaged" / "step-00000002" / f"tensors-{world.size - 1:05d}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    path = files.find_to_go_on()
    assert path is not None
    assert path.name == "step-00000001"
    restored = slices_of(world.rank, world.size, filled=False)
    assert restore(path, restored, world.backend) == {"step": 1}
    assert holds_its_slices(restored)
    if world.rank == 0:
        assert (world.folder / "damaged" / "step-00000002.damaged").is_dir()
