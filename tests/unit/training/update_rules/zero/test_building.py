"""ZeRO-3 of a model that a function builds: what is in memory meanwhile, and which values the slices are of."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.training.trainer import Trainer
from hvdtrain.training.update_rules.zero.building import build_with_shards, is_built_sharded
from hvdtrain.training.update_rules.zero.initial_slice import initial_slice_of

WIDTH, RANKS = 160, 4
LAYERS = 6
KERNEL = WIDTH * WIDTH * 4
layers = keras.layers


class OneOfFour:
    """A rank among others that build the same model; `others` changes what they say of it."""

    def __init__(self, index, others=lambda facts: facts):
        self.size, self.index = RANKS, index
        self._others = others
        self.sent = []

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [json.dumps(self._others(json.loads(payload))).encode(), payload]

    def broadcast(self, tensors):
        self.sent += tensors

    def run(self, step):
        return step()

    def all_gather(self, tensor, *, name):
        self.sent.append(name)
        return tf.concat([tensor] * RANKS, 0)


def dense():
    return keras.Sequential([keras.Input((WIDTH,)), *(layers.Dense(WIDTH, "tanh") for _ in range(LAYERS))])


def on_rank(index, build=dense, **options):
    keras.utils.set_random_seed(0)
    return build_with_shards(build, OneOfFour(index, **options))


def plain(build=dense):
    keras.utils.set_random_seed(0)
    return build()


def bytes_of(variable):
    """Return the bytes that a variable takes, and those of the slice that is kept of it."""
    initial = initial_slice_of(variable)
    held = tf.raw_ops.ReadVariableOp(resource=variable._value.handle, dtype=variable._value.dtype)
    kept = 0 if initial is None or initial.values is None else initial.values._numpy().nbytes
    return held._numpy().nbytes + kept


@pytest.fixture
def peak(monkeypatch):
    """The most bytes of variables, with the one that was just drawn, whenever a kernel is drawn."""
    made, seen = [], []
    draw, track = keras.initializers.GlorotUniform.__call__, layers.Layer._track_variable

    def drawn(self, shape, dtype=None):
        whole = draw(self, shape, dtype)
        seen.append(sum(map(bytes_of, made)) + whole._numpy().nbytes)
        return whole

    def tracked(self, variable):
        made.append(variable)
        track(self, variable)

    monkeypatch.setattr(keras.initializers.GlorotUniform, "__call__", drawn)
    monkeypatch.setattr(layers.Layer, "_track_variable", tracked)
    return seen


def test_a_rank_holds_its_slices_and_one_variable_while_the_model_is_built(peak):
    model = on_rank(1)
    biases = LAYERS * WIDTH * 4
    assert len(peak) == LAYERS
    assert max(peak) <= (LAYERS - 1) * KERNEL / RANKS + KERNEL + biases
    assert sum(map(bytes_of, model.variables)) == LAYERS * KERNEL / RANKS + biases
    peak.clear()
    plain()
    assert max(peak) >= LAYERS * KERNEL, "the measure would not notice a whole model"


def test_slices_are_those_of_the_values_in_every_other_layout():
    slices = [[initial_slice_of(layer.kernel).values for layer in on_rank(rank).layers] for rank in range(RANKS)]
    for layer, *parts in zip(plain().layers, *slices, strict=True):
        np.testing.assert_array_equal(np.concatenate(parts), layer.kernel.numpy().reshape(-1))
        assert len(parts) == RANKS


def test_a_builder_reads_what_it_would_read_anyway_and_assigns_whole_values():
    read = {}

    def build():
        model = dense()
        first, second = model.layers[:2]
        read["kernel"] = first.kernel.numpy()
        read["output"] = model(np.ones((2, WIDTH), "float32")).numpy()
        first.kernel.assign(2.0 * first.kernel)
        second.set_weights([np.full((WIDTH, WIDTH), 3.0), np.ones(WIDTH)])
        return model

    model, whole = on_rank(0, build), plain()
    np.testing.assert_array_equal(read["kernel"], whole.layers[0].kernel)
    np.testing.assert_allclose(read["output"], whole(np.ones((2, WIDTH), "float32")), atol=1e-6)
    mine = slice(0, WIDTH * WIDTH // RANKS)
    first, second = (initial_slice_of(layer.kernel).values.numpy() for layer in model.layers[:2])
    np.testing.assert_array_equal(first, 2.0 * whole.layers[0].kernel.numpy().reshape(-1)[mine])
    np.testing.assert_array_equal(second, np.full(mine.stop, 3.0))
    np.testing.assert_array_equal(model.layers[1].bias, np.ones(WIDTH))


def test_what_a_builder_has_assigned_cannot_be_read_again():
    def build():
        model = dense()
        model.layers[0].kernel.assign(np.zeros((WIDTH, WIDTH)))
        return model, model.layers[0].kernel.numpy()

    with pytest.raises(
        ConfigError, match=r"a look at \S+kernel after an assignment .* or give Trainer the built model"
    ):
        on_rank(0, build)


def test_what_is_not_trained_or_has_a_constraint_is_whole():
    def build():
        model = dense()
        model.layers[0].trainable = False
        return model

    model = on_rank(0, build)
    assert model.layers[0].kernel.numpy().shape == (WIDTH, WIDTH)
    assert initial_slice_of(model.layers[0].kernel) is None
    bounded = on_rank(
        0, lambda: keras.Sequential([keras.Input((WIDTH,)), layers.Dense(WIDTH, kernel_constraint="unit_norm")])
    )
    assert not is_built_sharded(bounded)


def test_an_initializer_of_ones_own_draws_once_and_rank_0_counts():
    calls = []

    def draw(shape, dtype=None):
        calls.append(shape)
        return tf.random.normal(shape, dtype=dtype)

    backend = OneOfFour(2)
    make = lambda: keras.Sequential([keras.Input((WIDTH,)), layers.Dense(WIDTH, kernel_initializer=draw)])  # noqa: E731
    model = build_with_shards(make, backend)
    assert calls == [(WIDTH, WIDTH)]
    assert backend.sent == ["zero_initial/layers/0/kernel"]
    assert initial_slice_of(model.layers[0].kernel).values.shape == (WIDTH * WIDTH // RANKS,)


def test_ranks_that_draw_other_values_take_those_of_the_first():
    def with_seed(seed):
        keras.utils.set_random_seed(seed)
        return build_with_shards(dense, OneOfFour(1, lambda facts: of_first or facts))

    of_first = None
    first = with_seed(7)
    of_first = [[f"float32[{WIDTH}, {WIDTH}]", s.checksum, s.seed] for s in map(kernel_slice, first.layers)]
    for layer, expected in zip(with_seed(8).layers, first.layers, strict=True):
        np.testing.assert_array_equal(kernel_slice(layer).values, kernel_slice(expected).values)
    of_first[2][2] = None  # as of a value that was assigned
    with pytest.raises(ConfigError, match=r"The ranks gave \S+kernel other values .* load them on every rank"):
        with_seed(8)
    of_first = of_first[1:]
    with pytest.raises(ConfigError, match="Every rank builds the same model"):
        with_seed(7)


def kernel_slice(layer):
    return initial_slice_of(layer.kernel)


@pytest.fixture
def _one_replica(session, monkeypatch):
    """One replica has the default rule; here stage 3 is tried on one."""
    monkeypatch.setattr("hvdtrain.training.update_rules.select.is_alone", lambda backend: False)


def trainer_of(stage, model=dense):
    keras.utils.set_random_seed(0)
    return Trainer(model, keras.optimizers.SGD(0.05, momentum=0.9), "mse", ["mae"], zero=stage)


DATA = (np.random.default_rng(0).standard_normal((24, WIDTH)), np.ones((24, WIDTH)))


@pytest.mark.usefixtures("_one_replica")
def test_a_model_that_is_built_as_slices_trains_and_is_evaluated_as_a_whole_one():
    figures, weights = [], []
    for stage in (0, 3):
        trainer = trainer_of(stage)
        assert is_built_sharded(trainer.model) == bool(stage)
        result = trainer.fit(DATA, validation_data=DATA, batch=12, epochs=2, shuffle=False, verbose=False)
        figures.append([each for record in result.evaluations for each in (record.loss, record.metrics["mae"])])
        weights.append(trainer.model.get_weights())
    assert figures[1] == pytest.approx(figures[0], rel=1e-6)
    for whole, sharded in zip(*weights, strict=True):
        np.testing.assert_allclose(sharded, whole, rtol=0, atol=1e-6)


@pytest.mark.usefixtures("_one_replica")
@pytest.mark.parametrize("use", ["evaluate", "predict"])
def test_it_can_be_used_before_it_is_trained(use):
    whole, sharded = trainer_of(0), trainer_of(3)
    outcomes = [getattr(trainer, use)(DATA[0] if use == "predict" else DATA, verbose=0) for trainer in (whole, sharded)]
    if use == "predict":
        np.testing.assert_allclose(outcomes[1], outcomes[0], atol=1e-6)
    else:
        assert outcomes[1] == pytest.approx(outcomes[0], rel=1e-6)


@pytest.mark.usefixtures("_one_replica")
def test_weights_are_out_of_reach_until_they_are_gathered():
    trainer, start = trainer_of(3), plain().get_weights()
    for look in (
        trainer.model.get_weights,
        lambda: trainer.model.set_weights(start),
        lambda: trainer.model(np.ones((2, WIDTH), "float32")),
    ):
        with pytest.raises(ConfigError, match=r"Before the first step .* Call trainer\.consolidate\(\) on every rank"):
            look()
    trainer.consolidate()
    for mine, expected in zip(trainer.model.get_weights(), start, strict=True):
        np.testing.assert_array_equal(mine, expected)


@pytest.mark.usefixtures("_one_replica")
def test_a_layer_that_is_frozen_before_the_training_is_whole():
    trainer = trainer_of(3)
    trainer.model.layers[1].trainable = False
    trainer.fit(DATA, batch=24, verbose=False)
    np.testing.assert_array_equal(trainer.model.layers[1].kernel, plain().layers[1].kernel)


@pytest.mark.usefixtures("_one_replica")
def test_an_evaluation_between_epochs_gathers_no_more_than_a_layer(monkeypatch):
    from hvdtrain.training.update_rules.zero.stage3 import ShardedParametersUpdate

    shown = []
    show = ShardedParametersUpdate.gather_weights
    monkeypatch.setattr(ShardedParametersUpdate, "gather_weights", lambda self: (shown.append(self._shown), show(self)))
    trainer = trainer_of(3)
    losses = []
    evaluate = trainer.evaluate_batches
    monkeypatch.setattr(
        trainer, "evaluate_batches", lambda *parts: losses.append((list(shown), evaluate(*parts))) or losses[-1][1]
    )
    trainer.fit(DATA, validation_data=DATA, batch=24, epochs=2, shuffle=False, verbose=False)
    assert [before for before, _ in losses] == [[], []]
    assert shown == [False], "the weights are whole after fit alone"
