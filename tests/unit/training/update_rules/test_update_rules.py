"""Update rules in one process: which one is chosen, what it refuses, and how a variable is cut into slices."""

from typing import get_args

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import SingleBackend
from hvdtrain.checkpoint.checkpointer import owned
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.run import Config
from hvdtrain.config.training import UpdateName
from hvdtrain.optim.optimizers import ELEMENTWISE, NoOptimizer
from hvdtrain.runtime.placement import Placement, Ranges, place
from hvdtrain.runtime.session import current
from hvdtrain.state.named_tensors import values_in
from hvdtrain.training.inputs import training_data
from hvdtrain.training.options import StepOptions, step_options
from hvdtrain.training.trainer import Trainer
from hvdtrain.training.update_rules.all_reduce import AllReduceUpdate
from hvdtrain.training.update_rules.local_sgd import LocalUpdate
from hvdtrain.training.update_rules.select import RULES, update_rule_for
from hvdtrain.training.update_rules.zero.shards import Shard
from hvdtrain.training.update_rules.zero.stage1 import ZeroUpdate
from hvdtrain.training.update_rules.zero.stage2 import ScatteredGradientsUpdate
from hvdtrain.training.update_rules.zero.stage3 import ShardedParametersUpdate
from tests.extended import mostly_extended

pytestmark = pytest.mark.usefixtures("session")


@pytest.fixture(autouse=True)
def _chosen_rule_for_one_replica(monkeypatch):
    """One replica has the default rule; here the others are tried on one."""
    monkeypatch.setattr("hvdtrain.training.update_rules.select.is_alone", lambda backend: False)


WIDTH = 160
RNG = np.random.default_rng(0)
X = RNG.standard_normal((24, WIDTH)).astype("float32")


def model(width=WIDTH):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(1)])


def rule_of(optimizer="sgd", **options):
    chosen, optimizer = step_options(options), keras.optimizers.get(optimizer)
    return update_rule_for(SingleBackend(current()), model(), optimizer, chosen)


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, AllReduceUpdate),
        ({"zero": 1}, ZeroUpdate),
        ({"zero": 2}, ScatteredGradientsUpdate),
        ({"zero": 3}, ShardedParametersUpdate),
        ({"local_steps": 1}, LocalUpdate),
        ({"zero": 0}, AllReduceUpdate),
    ],
)
def test_an_option_chooses_the_rule(options, kind):
    assert type(rule_of(**options)) is kind


BLOCKS = Ranges((slice(0, 4), slice(6, 8)))
"""A slice of each of two blocks."""


def test_slices_of_slices_are_boxes_of_the_whole():
    class Ranks:
        index, size = 1, 2

    for shape, box, expected in (
        ((6, 8), (slice(0, 6), slice(4, 8)), (slice(3, 6), slice(4, 8))),
        ((4, 5, 8), (slice(1, 2), slice(0, 5), slice(0, 8)), (slice(1, 2), slice(3, 5), slice(0, 8))),
        ((4, 8), (slice(0, 4), BLOCKS), (slice(2, 4), BLOCKS)),
        ((8,), (BLOCKS,), (Ranges((slice(3, 4), slice(6, 8))),)),
    ):
        whole = np.arange(np.prod(shape, dtype=float)).reshape(shape)
        variable = keras.Variable(values_in(whole, box), dtype="float32")
        place(variable, Placement(shape, box, ("tp",)))
        shard = Shard(variable, Ranks())
        tensor = shard.named_tensor(shard.master.value)
        assert (tensor.global_shape, tensor.slice, tensor.replicated) == (shape, expected, False)
        np.testing.assert_array_equal(np.ravel(values_in(whole, expected)), shard.cut())
        (owned_by_this_rank,) = owned({"slot": tensor}, SecondOfTwo(lambda mine: b"[]"))
        np.testing.assert_array_equal(owned_by_this_rank.array(), values_in(whole, expected))
        assert owned({"slot": tensor}, SecondOfTwo(lambda mine: mine)) == [], "the rank before it holds the same slice"


class SecondOfTwo:
    """The second of two replicas; `first` makes of what this one says what the first one says."""

    rank, primary, job_size, processes = 1, False, 2, 2

    def __init__(self, first):
        self._first = first

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [self._first(payload), payload]


def test_every_rule_is_an_option_of_the_configuration_or_a_value_of_update():
    assert set(RULES) <= {*vars(Config("any").update), *get_args(UpdateName)}
    assert set(get_args(UpdateName)) <= set(RULES)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7])
def test_slices_cover_a_variable_once_and_are_of_one_length_but_the_last_ones(size):
    class Ranks:
        def __init__(self, index):
            self.index, self.size = index, size

    whole = keras.Variable(np.arange(15.0).reshape(3, 5), dtype="float32", name="kernel")
    shards = [Shard(whole, Ranks(index)) for index in range(size)]
    np.testing.assert_array_equal(np.concatenate([shard.cut() for shard in shards]), np.arange(15.0))
    lengths = [shard.end - shard.begin for shard in shards]
    assert lengths == sorted(lengths, reverse=True)
    assert len(set(lengths) - {0, -(-15 // size)}) <= 1
    assert [shard.master.shape for shard in shards] == [(length,) for length in lengths]


def test_sharded_slots_say_where_in_the_whole_they_are():
    tensors = rule_of("adam", zero=1).named_tensors()
    flat = [tensor for tensor in tensors.values() if not tensor[3]]
    assert len(flat) == 2  # two moments of the one large kernel
    assert all(tensor[1] == (WIDTH * WIDTH,) and tensor[2] == (slice(0, WIDTH * WIDTH),) for tensor in flat)


@pytest.mark.parametrize(
    "kind",
    mostly_extended(
        [k for k in ELEMENTWISE if k not in (keras.optimizers.Ftrl, NoOptimizer)],
        lambda kind: kind is keras.optimizers.Nadam,
        why="it has most tensors besides the slices of the weights",
    ),
)
def test_elementwise_optimizers_train_alike_with_and_without_slices(kind):
    weights = []
    for zero in (0, 1, 3):
        trainer = Trainer(model(), kind(0.01), "mse", zero=zero)
        trainer.fit((X, X[:, :1]), batch=8, epochs=2, shuffle=False, verbose=False)
        weights.append(trainer.model.get_weights())
    for plain, *others in zip(*weights, strict=True):
        for sharded in others:
            np.testing.assert_allclose(sharded, plain, rtol=0, atol=1e-6 * np.abs(plain).max())


def test_an_optimizer_with_slots_is_refused():
    trained = model()
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(trained.trainable_variables)
    with pytest.raises(ConfigError, match="has slots for whole variables already"):
        update_rule_for(SingleBackend(current()), trained, optimizer, StepOptions(zero=1))


def test_a_process_alone_has_the_default_rule(monkeypatch):
    monkeypatch.undo()
    for options in ({"zero": 1}, {"local_steps": 3}):
        assert type(rule_of("adam", **options)) is AllReduceUpdate


def trained_both_ways(make_model, make_optimizer, callbacks=tuple, epochs=2, stages=(0, 1, 3)):
    """Return the weights after training without slices and with them."""
    weights = []
    for zero in stages:
        trainer = Trainer(make_model(), make_optimizer(), "mse", zero=zero)
        data = (X, X[:, :1])
        trainer.fit(data, batch=8, epochs=epochs, shuffle=False, verbose=False, callbacks=list(callbacks()))
        weights.append(trainer.model.get_weights())
    return weights


def assert_alike(plain, *sharded):
    for weights in sharded:
        for one, other in zip(plain, weights, strict=True):
            np.testing.assert_allclose(other, one, rtol=0, atol=1e-6)


def test_variables_with_a_constraint_stay_whole():
    def constrained():
        keras.utils.set_random_seed(0)
        bound = keras.constraints.MaxNorm(0.5)
        return keras.Sequential(
            [keras.Input((WIDTH,)), keras.layers.Dense(WIDTH, kernel_constraint=bound), keras.layers.Dense(1)]
        )

    plain, *sharded = trained_both_ways(constrained, lambda: keras.optimizers.SGD(0.1))
    assert_alike(plain, *sharded)
    assert np.linalg.norm(sharded[0][0], axis=0).max() <= 0.5 + 1e-6


@pytest.mark.extended
def test_exclusions_from_decay_by_the_name_of_a_layer_hold_for_slices():
    def named():
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(WIDTH, name="spared"), keras.layers.Dense(WIDTH), keras.layers.Dense(1)]
        return keras.Sequential([keras.Input((WIDTH,)), *layers])

    def optimizer():
        made = keras.optimizers.AdamW(0.001, weight_decay=50.0)
        made.exclude_from_weight_decay(var_names=["spared"])
        return made

    plain, *sharded = trained_both_ways(named, optimizer)
    assert_alike(plain, *sharded)
    assert np.linalg.norm(sharded[0][0]) > 1.2 * np.linalg.norm(sharded[0][2]), "the exclusion did nothing"


EVENTS = ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_batch_begin", "on_train_batch_end"]


@pytest.mark.parametrize(
    "event",
    mostly_extended(
        EVENTS,
        lambda event: event == "on_train_batch_end",
        why="the one that comes between two updates",
    ),
)
def test_weights_that_a_callback_sets_reach_the_slices(event):
    def reset(self, *args, **kwargs):
        self.calls += 1
        if self.calls in (1, 3):
            self.model.set_weights([np.full_like(weight, 0.01) for weight in self.model.get_weights()])

    kind = type("Reset", (keras.callbacks.Callback,), {"calls": 0, event: reset})
    assert_alike(*trained_both_ways(model, lambda: keras.optimizers.SGD(0.01), lambda: [kind()], epochs=4))


@pytest.mark.parametrize("stage", [1, 3])
def test_restored_weights_reach_the_slices(stage):
    trainer = Trainer(model(), keras.optimizers.SGD(1e-9), "mse", zero=stage)
    data = training_data((X, X[:, :1]), trainer.backend, batch=8, seed=0, shuffle=False, steps_per_epoch=None)
    trainer.build(data)
    for weight in trainer.model.weights:
        weight.assign(tf.ones_like(weight))
    trainer.broadcast_state()
    trainer.compiled_step(data)(next(iter(data.batches(0))), measure=False)
    trainer.consolidate()
    for weight in trainer.model.get_weights():
        np.testing.assert_allclose(weight, 1.0, rtol=1e-3)


def test_local_weights_are_not_saved_within_an_epoch(tmp_path):
    trainer = Trainer(model(), "sgd", "mse", local_steps=2)
    early = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras", save_freq=2)
    with pytest.raises(ConfigError, match=r"ModelCheckpoint\(save_freq=2\) would save rank 0's own weights"):
        trainer.fit((X, X[:, :1]), batch=8, verbose=False, callbacks=[early])


@pytest.mark.parametrize(("stage", "precision"), [(3, None), (1, "mixed_float16")])
def test_a_saved_model_holds_no_slices(tmp_path, stage, precision):
    trainer = Trainer(model(), keras.optimizers.Adam(0.01), "mse", zero=stage, precision=precision)
    checkpoint = keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")
    with pytest.warns(UserWarning, match=rf"zero={stage} keeps the optimizer's slots by parts: the file has none"):
        trainer.fit((X, X[:, :1]), batch=8, epochs=1, verbose=False, callbacks=[checkpoint])
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for saved, weight in zip(loaded.get_weights(), trainer.model.get_weights(), strict=True):
        np.testing.assert_array_equal(saved, weight)
    loaded.fit(X, X[:, :1], verbose=0)
    with pytest.warns(UserWarning, match="the file has none of them"):
        trainer.model.save(tmp_path / "again.keras")
    trainer.model.fit(X, X[:, :1], verbose=0)


AFTERWARDS = {
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.01, 20)),
    "ema": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), initial_scale=8.0),
}


@pytest.mark.parametrize(("stage", "name"), [(1, "ema"), (3, "scaled"), (3, "adam")])
def test_the_optimizer_is_the_models_again_after_a_fit(tmp_path, stage, name):
    def compiled():
        made = model()
        made.compile(AFTERWARDS[name](), "mse")
        return made

    alone, sharded = compiled(), compiled()
    trainer, fit = Trainer(sharded, zero=stage), {"epochs": 1, "shuffle": False, "verbose": 0}
    for number, by_trainer in enumerate((True, False, True)):
        alone.fit(X, X[:, :1], batch_size=8, **fit)
        if by_trainer:
            trainer.fit(X, X[:, :1], batch=8, **fit)
        else:
            sharded.fit(X, X[:, :1], batch_size=8, **fit)
        if number == 0:
            trainer.save(tmp_path / "states")
        sharded.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        for held in (sharded, loaded):
            pair = ([*each.optimizer.variables, *each.weights] for each in (held, alone))
            for mine, theirs in zip(*pair, strict=True):
                np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6, err_msg=f"{number} {theirs.path}")


class Broken(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise RuntimeError("broken")


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exception_leaves_a_model_that_keras_and_the_trainer_go_on_with(stage):
    alone, sharded = model(), model()
    for each in (alone, sharded):
        each.compile(keras.optimizers.Adam(0.01), "mse")
    trainer, fit = Trainer(sharded, zero=stage), {"epochs": 1, "shuffle": False, "verbose": 0}
    alone.fit(X, X[:, :1], batch_size=8, **fit)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(X, X[:, :1], batch=8, callbacks=[Broken()], **fit)
    for mine, theirs in zip(sharded.weights, alone.weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    alone.fit(X, X[:, :1], batch_size=8, **fit)
    trainer.fit(X, X[:, :1], batch=8, **fit)
    for mine, theirs in zip(
        [*sharded.optimizer.variables, *sharded.weights], [*alone.optimizer.variables, *alone.weights], strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(X, X[:, :1], batch=8, callbacks=[Broken()], **fit)
    sharded.fit(X, X[:, :1], batch_size=8, **fit)  # with new moments
    trainer.fit(X, X[:, :1], batch=8, **fit)
    assert int(sharded.optimizer.iterations) == 5 * -(-len(X) // 8)


def test_the_bound_is_on_the_norm_of_the_whole():
    weights = []
    for zero in (0, 1):
        trainer = Trainer(model(), keras.optimizers.SGD(0.01), "mse", zero=zero, clip_norm=0.5)
        trainer.fit((X, X[:, :1]), batch=24, epochs=1, shuffle=False, verbose=False)
        weights.append(trainer.model.get_weights())
    for plain, sharded in zip(*weights, strict=True):
        np.testing.assert_allclose(sharded, plain, rtol=0, atol=1e-6)
