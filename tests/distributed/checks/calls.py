"""Calls in which the ranks differ: refused on all of them, or settled by rank 0, and never a hang."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from checks.training import CROSSENTROPY, classifier, samples
from world import World, flat_bytes
from worlds import worlds

import hvdtrain
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.training.inputs import training_data
from hvdtrain.training.plan import Plan

DATA = samples(48)


def trainer_of(world: World, model: Any = None, optimizer: Any = "sgd", **options: Any) -> Any:
    return hvdtrain.Trainer(model or classifier(0), optimizer, CROSSENTROPY, backend=world.backend, **options)


def refusal(world: World, call: Callable[[], Any], kind: type[Exception] = ConfigError) -> str:
    """Return the one message with which all ranks refuse."""
    try:
        call()
    except kind as error:
        said = str(error)
    else:
        said = ""
    assert said, "not refused"
    assert world.same_everywhere(said.encode()), said
    return said


@worlds("mpirun-2", "gloo-2")
def check_arguments_that_differ_by_rank_are_refused(world: World) -> None:
    trainer, last = trainer_of(world), world.rank == world.size - 1

    def mine(usual: Any, on_last: Any) -> Any:
        return on_last if last else usual

    stopping = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "epochs": ({"epochs": mine(1, 2)}, "epochs is 1 on rank 0"),
        "log_every": ({"log_every": mine(10, 3)}, "log_every is 10 on rank 0"),
        "batch": ({"batch": mine(16, 32)}, "batch is 16 on rank 0"),
        "no batch": ({"batch": mine(16, None)}, "batch is 16 on rank 0"),
        "shuffle": ({"shuffle": mine(True, False)}, "shuffle is True on rank 0"),
        "steps": ({"steps_per_epoch": mine(None, 3)}, "steps_per_epoch is None on rank 0"),
        "validation": ({"validation_data": mine(DATA, None)}, "validation_data is arrays on rank 0"),
        "classes": ({"class_weight": mine({0: 2.0}, {0: 3.0})}, "class_weight is [(0, 2.0)] on rank 0"),
        "callback": ({"callbacks": mine([stopping], [])}, "set weights or rates is EarlyStopping on rank 0"),
        "kind": ({"x": mine(DATA, tf.data.Dataset.from_tensor_slices(DATA))}, "x is arrays on rank 0"),
    }
    for name, (options, said) in cases.items():
        arguments = {"x": DATA, "batch": 16, "verbose": False, **options}
        message = refusal(world, lambda arguments=arguments: trainer.fit(**arguments))  # type: ignore[misc]
        assert said in message, (name, message)
        assert f" on rank {world.size - 1}." in message, (name, message)
    assert "batch is 16 on rank 0" in refusal(world, lambda: trainer.evaluate(DATA, batch=mine(16, 32)))
    assert "batch is 16 on rank 0" in refusal(world, lambda: trainer.predict(DATA[0], batch=mine(16, 32)))
    trainer.fit(DATA, batch=16, verbose=False)  # the ranks are in step still


@worlds("mpirun-2", "gloo-2")
def check_objects_travel_between_the_ranks(world: World) -> None:
    rank, size, last = world.rank, world.size, world.size - 1
    config = {"rate": 0.1, "vocabulary": {"a": 1}, "data": np.arange(3)} if rank == last else None
    received = hvdtrain.broadcast_object(config, root_rank=last)
    assert received["vocabulary"] == {"a": 1}
    assert received["data"].tolist() == [0, 1, 2]
    assert hvdtrain.broadcast_object("only rank 0's" if rank == 0 else None) == "only rank 0's"
    assert hvdtrain.gather_object((rank, "x" * rank)) == [(each, "x" * each) for each in range(size)]
    large = np.random.default_rng(0).bytes(20_000_000)
    assert hvdtrain.broadcast_object(large if rank == 0 else b"") == large
    hvdtrain.barrier()
    written = hvdtrain.rank_zero_only(lambda text: f"wrote {text}")
    assert written("it") == ("wrote it" if rank == 0 else None)
    assert hvdtrain.is_initialized()


@worlds("mpirun-2", "gloo-2", extended=True)
def check_objects_are_refused_by_all_ranks_where_one_is_wrong(world: World) -> None:
    trainer, last = trainer_of(world), world.rank == world.size - 1

    def fit_or_wait() -> Any:
        return trainer.fit(DATA, batch=16, verbose=False) if last else hvdtrain.barrier()

    said = refusal(world, fit_or_wait)
    assert "the call is barrier() on rank 0" in said, said
    assert "fit() on rank" in said, said
    said = refusal(world, lambda: hvdtrain.barrier("loaded" if last else "saved"))
    assert "name is 'loaded' on rank" in said or "name is 'saved' on rank" in said, said
    said = refusal(world, lambda: hvdtrain.broadcast_object(1, root_rank=int(last)))
    assert "root_rank is" in said, said
    said = refusal(world, lambda: hvdtrain.broadcast_object(lambda: 1))
    assert said.startswith("rank 0: hvdtrain.broadcast_object(): The object must be one that pickle takes"), said
    said = refusal(world, lambda: hvdtrain.gather_object(open if not last else lambda: 1))
    assert said.startswith(f"rank {world.size - 1}: hvdtrain.gather_object()"), said
    hvdtrain.barrier("in step still")


@worlds("mpirun-2", "gloo-2")
def check_calls_that_differ_by_rank_are_refused(world: World) -> None:
    trainer, last = trainer_of(world), world.rank == world.size - 1
    said = refusal(
        world, lambda: trainer.evaluate(DATA, batch=16) if last else trainer.fit(DATA, batch=16, verbose=False)
    )
    assert "Received: the call is fit() on rank 0" in said, said
    data = training_data(DATA, world.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    saved: list[int] = []
    save = None if last else lambda state: saved.append(state.scalars.step)
    said = refusal(world, lambda: trainer.train(data, Plan(3), save=save))
    assert "save is a function on rank 0" in said, said
    assert "None on rank" in said, said


@worlds("mpirun-2", "gloo-2", extended=True)
def check_trainers_that_differ_by_rank_are_refused(world: World) -> None:
    last = world.rank == world.size - 1
    decay = keras.optimizers.schedules.ExponentialDecay
    cases: dict[str, Callable[[], Any]] = {
        "Trainer(seed=…) is 0 on rank 0": lambda: trainer_of(world, seed=int(last)),
        "Trainer(clip_norm=…) is 1.0 on rank 0": lambda: trainer_of(world, **({} if last else {"clip_norm": 1.0})),
        "SGD.momentum is 0.5 on rank 0": lambda: trainer_of(
            world, optimizer=keras.optimizers.SGD(0.1, momentum=0.9 if last else 0.5)
        ),
        "SGD.learning_rate.config.decay_steps is 10 on rank 0": lambda: trainer_of(
            world, optimizer=keras.optimizers.SGD(decay(0.1, 20 if last else 10, 0.5))
        ),
        "the optimizer is SGD on rank 0": lambda: trainer_of(world, optimizer="adam" if last else "sgd"),
    }
    for expected, make in cases.items():
        trainer = make()
        said = refusal(world, lambda trainer=trainer: trainer.fit(DATA, batch=16, verbose=False))  # type: ignore[misc]
        assert expected in said, said


def uncounted(batches: int) -> tf.data.Dataset:
    """Batches of which nobody knows the number before they are read."""
    return tf.data.Dataset.from_tensor_slices(DATA).batch(8).filter(lambda x, y: True).take(batches)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_one_rank_with_more_batches_is_noticed_by_those_who_look_at_each(world: World) -> None:
    seen: list[int] = []

    class Looking(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(batch)

    count = 2 if world.rank == world.size - 1 else 5
    trainer = trainer_of(world)
    said = refusal(
        world,
        lambda: trainer.fit(DATA, batch=16, validation_data=uncounted(count), callbacks=[Looking()], verbose=False),
        DataError,
    )
    assert f"The validation data have 2 batches on rank {world.size - 1} and more on rank 0." in said, said
    assert seen == [0, 1]
    said = refusal(world, lambda: trainer.predict(uncounted(count)), DataError)
    assert f"The prediction data have 2 batches on rank {world.size - 1} and more on rank 0." in said, said

    def generate() -> Any:
        for _ in range(count):
            yield DATA

    assert "on rank 0" in refusal(world, lambda: trainer.evaluate(generate), DataError)
    trainer.fit(DATA, batch=16, validation_data=uncounted(4), callbacks=[Looking()], verbose=False)
    assert seen == [0, 1, 0, 1, 2, 3]


@worlds("mpirun-2", "gloo-2", extended=True)
def check_weights_that_rank_0_alone_loaded_are_evaluated(world: World) -> None:
    x, y = DATA
    model = classifier(world.rank)
    expected = float(CROSSENTROPY(y, classifier(0)(x)))
    trainer = trainer_of(world, model)
    np.testing.assert_allclose(trainer.evaluate(DATA, return_dict=True)["loss"], expected, rtol=1e-6)
    if world.rank == 0:
        model.set_weights([weight + 1.0 for weight in model.get_weights()])
    outputs = trainer.predict(x, batch=16)
    assert world.same_everywhere(outputs.tobytes())
    other = classifier(0)
    other.set_weights([weight + 1.0 for weight in other.get_weights()])
    np.testing.assert_allclose(outputs, other(x), rtol=1e-5, atol=1e-6)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_a_model_that_each_rank_builds_by_itself_predicts_alike(world: World) -> None:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(world.rank)
    trainer = trainer_of(world, keras.Sequential([keras.layers.Dense(3)]))
    if world.rank == 0:
        trainer.model(DATA[0][:1])  # rank 0 has called it before
    outputs = trainer.predict(DATA[0], batch=16)
    assert world.same_everywhere(flat_bytes(trainer.model.get_weights()))
    np.testing.assert_allclose(outputs, trainer.model(DATA[0]), rtol=1e-5, atol=1e-6)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_averages_that_rank_0_alone_has_are_evaluated(world: World) -> None:
    def averaging(seed: int) -> Any:
        return trainer_of(world, classifier(seed), keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5))

    first = averaging(0)
    first.fit(DATA, batch=16, epochs=2, verbose=False)
    expected = first.evaluate(DATA, return_dict=True)["loss"]
    second = averaging(1 + world.rank)
    second.build_on(next(iter(first_batches(second))))
    if world.rank == 0:
        theirs = first.state.named_tensors()
        for path, mine in second.state.named_tensors().items():
            mine.value.assign(theirs[path].value)
    np.testing.assert_allclose(second.evaluate(DATA, return_dict=True)["loss"], expected, rtol=1e-6)


def first_batches(trainer: Any) -> Any:
    data = training_data(DATA, trainer.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    return data.batches(0)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_fit_goes_on_from_what_rank_0_alone_restored(world: World) -> None:
    trainer = trainer_of(world)
    data = training_data(DATA, world.backend, batch=16, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    if world.rank == 0:
        trainer.state.restore({"step": 6, "epoch": 2})
    result = trainer.fit(DATA, batch=16, epochs=2, verbose=False)
    assert (result.steps, result.epochs) == (12, 4), result
    trainer.state.agreed_hash(world.backend)


@worlds("mpirun-2")
@worlds("gloo-2", extended=True)
def check_weights_that_a_callback_sets_on_one_rank_are_refused(world: World) -> None:
    def of_last_rank(**hooks: Callable[..., None]) -> list[Any]:
        return [keras.callbacks.LambdaCallback(**hooks if world.rank == world.size - 1 else {})]

    for moment in ("on_train_begin", "on_epoch_end", "on_train_end"):
        trainer = trainer_of(world)

        def disturb(*_: Any, trainer: Any = trainer) -> None:
            kernel = trainer.model.trainable_variables[0]
            kernel.assign(kernel + 1.0)

        callbacks = of_last_rank(**{moment: disturb})
        said = refusal(
            world,
            lambda trainer=trainer, callbacks=callbacks: trainer.fit(  # type: ignore[misc]
                DATA, batch=16, callbacks=callbacks, verbose=False
            ),
        )
        assert f"Rank {world.size - 1} holds other weights than rank 0. Callbacks" in said, (moment, said)
