"""A model that a function builds for a pipeline: what is in memory meanwhile, and what the stages begin with."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.compat.keras_variables import state_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.pipeline.cut import cut_model
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.initial_values import build_lazily, materialize
from hvdtrain.state.structure import structure_of

WIDTH, LAYERS, RANKS = 160, 6, 2
KERNEL = WIDTH * WIDTH * 4
layers = keras.layers


def dense():
    return keras.Sequential([keras.Input((WIDTH,)), *(layers.Dense(WIDTH, "tanh") for _ in range(LAYERS))])


def plain(build=dense):
    keras.utils.set_random_seed(0)
    return build()


def without_values(build=dense):
    keras.utils.set_random_seed(0)
    return build_lazily(build)


def stage_of(rank, model):
    stage = PipelineStage(model, cut_model(model, RANKS), rank, RANKS)
    materialize(stage.variables)
    return stage


def bytes_of(variable):
    """Return the bytes of memory that a variable takes."""
    held = tf.raw_ops.ReadVariableOp(resource=variable._value.handle, dtype=variable._value.dtype)
    return held._numpy().nbytes


@pytest.fixture
def peak(monkeypatch):
    """The most bytes of variables, with the one that is just being made, whenever one has been made."""
    made, seen = [], []
    track = layers.Layer._track_variable

    def tracked(self, variable):
        seen.append(sum(map(bytes_of, made)) + WIDTH * (WIDTH if len(variable.shape) == 2 else 1) * 4)
        made.append(variable)
        track(self, variable)

    monkeypatch.setattr(layers.Layer, "_track_variable", tracked)
    return seen


def test_a_rank_holds_one_variable_while_the_model_is_built_and_then_its_stage(peak):
    model = without_values()
    assert max(peak) == KERNEL
    assert sum(map(bytes_of, model.variables)) == 0
    stage = stage_of(1, model)
    assert (
        sum(map(bytes_of, model.variables)) == sum(map(bytes_of, stage.variables)) == LAYERS / 2 * (KERNEL + WIDTH * 4)
    )
    peak.clear()
    plain()
    assert max(peak) >= LAYERS * KERNEL, "the measure would not notice a whole model"


def test_stages_begin_with_the_values_of_one_process():
    whole = plain()
    expected = structure_of(whole).by_path(whole.weights)
    seen = set()
    for rank in range(RANKS):
        stage = stage_of(rank, without_values())
        assert {type(variable) for variable in stage.weights} == {keras.Variable}
        for path, variable in stage.structure.by_path(stage.weights).items():
            np.testing.assert_array_equal(variable, expected[path])
            seen.add(path)
    assert seen == set(expected)


def test_a_builder_reads_what_it_would_read_anyway_and_what_it_assigns_stays():
    read = {}

    def build():
        model = dense()
        first, second = model.layers[:2]
        read["kernel"] = first.kernel.numpy()
        read["output"] = model(np.ones((2, WIDTH), "float32")).numpy()
        first.kernel.assign(2.0 * first.kernel)
        first.kernel.assign_add(tf.ones_like(first.kernel))
        read["doubled"] = first.kernel.numpy()
        second.set_weights([np.full((WIDTH, WIDTH), 3.0), np.ones(WIDTH)])
        return model

    whole = plain()
    kernel = whole.layers[0].kernel.numpy()
    model = without_values(build)
    np.testing.assert_array_equal(read["kernel"], kernel)
    np.testing.assert_allclose(read["output"], whole(np.ones((2, WIDTH), "float32")), atol=1e-6)
    stage = stage_of(0, model)
    for found in (read["doubled"], stage.held_layers[0].kernel):
        np.testing.assert_array_equal(found, 2.0 * kernel + 1.0)
    np.testing.assert_array_equal(stage.held_layers[1].kernel, np.full((WIDTH, WIDTH), 3.0))
    np.testing.assert_array_equal(stage.held_layers[1].bias, np.ones(WIDTH))


def test_weights_are_loaded_from_a_file(tmp_path):
    saved = plain()
    saved.layers[0].kernel.assign(np.full((WIDTH, WIDTH), 5.0))
    saved.save_weights(tmp_path / "all.weights.h5")

    def build():
        model = dense()
        model.load_weights(tmp_path / "all.weights.h5")
        return model

    model = without_values(build)
    for mine, wanted in zip(model.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, wanted)
    np.testing.assert_array_equal(stage_of(0, model).held_layers[0].kernel, saved.layers[0].kernel)


def test_what_may_draw_something_else_the_next_time_is_drawn_once():
    generator = keras.random.SeedGenerator(3)

    def build():
        drawn = keras.initializers.RandomNormal(seed=generator)
        own = lambda shape, dtype=None: tf.random.normal(shape, dtype=dtype)  # noqa: E731
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(4, kernel_initializer=drawn),
                layers.Dense(4, kernel_initializer=own),
                layers.Dense(4),
            ]
        )

    model = without_values(build)
    kinds = [state_of(layer.kernel) is not None for layer in model.layers]
    assert kinds == [False, False, True]
    before = [layer.kernel.numpy() for layer in model.layers]
    materialize(model.variables)
    for layer, values in zip(model.layers, before, strict=True):
        np.testing.assert_array_equal(layer.kernel, values)


def test_a_function_that_was_traced_before_computes_with_the_values_that_came_later():
    traced = {}

    def build():
        model = dense()
        traced["call"] = tf.function(model).get_concrete_function(tf.TensorSpec([2, WIDTH]))
        return model

    model = without_values(build)
    materialize(model.variables)
    x = tf.ones([2, WIDTH])
    np.testing.assert_allclose(traced["call"](x), plain()(x), atol=1e-6)


def test_layers_of_other_stages_cannot_be_read():
    model = without_values()
    stage = stage_of(0, model)
    stage.free_other_stages()
    assert stage.held_layers[0].kernel.numpy().shape == (WIDTH, WIDTH)
    with pytest.raises(ConfigError, match="Another rank has the value of"):
        model.layers[-1].kernel.numpy()


def test_tied_weights_and_batch_normalization_start_alike():
    def build():
        inputs = keras.Input((8,), dtype="int32")
        table = layers.ReversibleEmbedding(16, 8, name="table")
        x = layers.BatchNormalization(name="norm")(layers.Dense(8)(table(inputs)))
        return keras.Model(inputs, table(layers.Dense(8)(x), reverse=True))

    whole = plain(build)
    model = without_values(build)
    materialize(model.variables)
    for mine, wanted in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, wanted)
