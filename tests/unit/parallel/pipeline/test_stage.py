"""How a model is cut into the stages of a pipeline, in one process: without ranks."""

import gc
import re
import weakref
from collections.abc import Mapping
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.config.errors import ConfigError, in_script
from hvdtrain.models.bert import build as bert
from hvdtrain.models.mlp import build as mlp
from hvdtrain.models.transformer import build as transformer
from hvdtrain.parallel.pipeline.cut import cut_model
from hvdtrain.parallel.pipeline.exchange import boundary_specs
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.advice import pipeline_notes
from hvdtrain.training.options import step_options
from hvdtrain.training.pipelined.staging import staged

layers = keras.layers


def stages_of(model, ranks, chunks=1, names=()):
    cut = cut_model(model, ranks * chunks, names)
    return [PipelineStage(model, cut, rank, ranks) for rank in range(ranks)]


def called(stages, x, *, training=False):
    """Pass `x` through all stages, as the ranks of a pipeline would."""
    cut = stages[0].whole.cut
    passed = []
    for number in range(cut.stages):
        stage = stages[number % len(stages)]
        received = [tf.identity(tensor) for tensor in passed]  # masks are not attributes of what is received
        made = stage.run_stage(number, stage.model_inputs(x), received, training=training)
        passed = with_masks(cut, number, made)
        specs = boundary_specs(cut, stage.model_inputs(x), number)
        assert [(tuple(t.shape[1:]), t.dtype) for t in passed] == [(spec.shape[1:], spec.dtype) for spec in specs]
    return stages[-1].outputs_of(passed[: len(cut.graph.outputs)])


def tokens(length=8, vocabulary=20):
    return np.random.default_rng(0).integers(0, vocabulary, (3, length)).astype("int32")


def sequential():
    return keras.Sequential([keras.Input((6,)), *(layers.Dense(6, activation="relu") for _ in range(5))])


def two_towers():
    """Several inputs and outputs, a skip connection over everything, and a layer that is called twice."""
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    shared = layers.Dense(6, name="shared")
    x = layers.Add()([shared(a), layers.Dense(6)(b)])
    y = layers.Dense(6, activation="tanh")(x)
    z = shared(layers.Concatenate()([y, x])[:, :6])
    return keras.Model(
        {"a": a, "b": b}, {"one": layers.Dense(2, name="one")(z + b), "two": layers.Dense(1, name="two")(x)}
    )


MODELS = {
    "transformer": (lambda: transformer((8,), 20, 0, depth=3, width=16, heads=2), tokens),
    "bert": (lambda: bert((8,), 20, 0, depth=3, width=16, heads=2), tokens),
    "mlp": (lambda: mlp((4, 4), 3, 0, depth=4, width=8), lambda: np.ones((3, 4, 4), "float32")),
    "sequential": (sequential, lambda: np.ones((3, 6), "float32")),
    "two_towers": (two_towers, lambda: {"a": np.ones((3, 6), "float32"), "b": np.full((3, 6), 2.0, "float32")}),
}


@pytest.mark.parametrize(("ranks", "chunks"), [(2, 1), (4, 1), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_stages_compute_what_the_model_does_and_hold_each_weight_once(name, ranks, chunks):
    build, samples = MODELS[name]
    model, x = build(), samples()
    stages = stages_of(model, ranks, chunks)
    expected, found = model(x, training=False), called(stages, x)
    tf.nest.map_structure(lambda a, b: np.testing.assert_array_equal(a, b), found, expected)
    paths = [list(structure_of(stage).by_path(stage.trainable_variables)) for stage in stages]
    assert all(paths), "a stage trains nothing"
    whole = structure_of(model).by_path(model.trainable_variables)
    tied = set(stages[0].tied)
    assert sorted(path for part in paths for path in part if path not in tied) == sorted(set(whole) - tied)
    assert tied == ({"layers/2/bias", "layers/2/kernel"} & tied if name == "two_towers" else set())


def test_equal_blocks_are_cut_into_equal_stages_where_one_tensor_leads_on():
    cut = cut_model(transformer((8,), 20, 0, depth=8, width=16, heads=2), 4)
    costs = [cut.cost(stage) for stage in range(4)]
    assert max(costs) / min(costs) < 1.2
    assert all(len(cut.outgoing(stage)) == 1 for stage in range(3))
    assert cut.first_names()[1:] == ["block2_attention_norm", "block4_attention_norm", "block6_attention_norm"]


def test_a_cut_by_hand_is_where_the_names_say_and_may_send_several_tensors():
    model = transformer((8,), 20, 0, depth=2, width=16, heads=2)
    stages = stages_of(model, 2, names=["block0_mlp_in"])
    assert stages[0].whole.cut.first_names()[1] == "block0_mlp_in"
    assert len(stages[0].whole.cut.outgoing(0)) == 2  # the block's input passes by
    np.testing.assert_array_equal(called(stages, tokens()), model(tokens()))


def test_masks_travel_with_what_they_mask():
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(inputs)
    model = keras.Model(inputs, layers.LSTM(3)(layers.Dense(4)(x)))
    stages = stages_of(model, 2, names=[model.layers[-1].name])
    np.testing.assert_array_equal(called(stages, tokens()), model(tokens()))
    known = stages[0].model_inputs(tokens())
    first, *masks = with_masks(stages[0].whole.cut, 0, stages[0].run_stage(0, known, [], training=False))
    nothing_masked = [first, *map(tf.ones_like, masks)]
    assert not np.allclose(stages[1].run_stage(1, known, nothing_masked, training=False)[0], model(tokens()))


@pytest.mark.parametrize("first", ["add", "attended", "added", "normed"])
def test_masks_that_attention_takes_off_travel_as_far_as_in_the_whole_model(first):
    inputs = keras.Input((8,), dtype="int32")
    x = layers.Embedding(20, 4, mask_zero=True)(inputs)
    x = layers.LayerNormalization(name="normed")(layers.Dense(4)(x))
    x = layers.Add(name="added")([x, layers.MultiHeadAttention(2, 2, name="attended")(x, x)])
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 2)(x, x))
    model = keras.Model(inputs, layers.LSTM(3)(x))
    names = [layer.name for layer in model.operations]
    first = next(name for name in names if name.startswith(first))
    np.testing.assert_array_equal(called(stages_of(model, 2, names=[first]), tokens()), model(tokens()))


def test_a_tied_weight_is_known_with_the_ranks_that_hold_it():
    inputs = keras.Input((6,))
    shared = layers.Dense(6, name="shared")
    model = keras.Model(inputs, shared(layers.Dense(6)(layers.Dense(6)(shared(inputs)))))
    for stage in stages_of(model, 2):
        assert {path: weight.places for path, weight in stage.tied.items()} == {
            "layers/1/bias": (0, 1),
            "layers/1/kernel": (0, 1),
        }
        counted = [stage.counts(variable) for variable in model.layers[1].trainable_variables]
        assert counted == [stage.place == 0] * 2
    assert stages_of(model, 1, 2)[0].tied == {}, "both stages are on one rank"


def test_weights_of_other_stages_can_be_freed():
    model, x = transformer((8,), 20, 0, depth=2, width=16, heads=2), tokens()
    expected = model(x)
    first, last = stages_of(model, 2)
    known = first.model_inputs(x)
    passed = first.run_stage(0, known, [], training=False)
    others = [weakref.ref(variable.value) for variable in first.trainable_variables]
    last.free_other_stages()
    gc.collect()
    assert all(freed() is None for freed in others), "the memory is in use"
    np.testing.assert_array_equal(last.run_stage(1, known, passed, training=False)[0], expected)
    assert set(structure_of(last).paths.values()) == set(structure_of(last).by_path(last.variables))


class Scaled(layers.Layer):
    """A layer whose output shape Keras infers by calling it."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]))

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def test_shapes_of_samples_of_any_length_are_known_without_the_weights_of_other_stages():
    for rank in range(2):
        inputs = keras.Input((None, 4))
        stage = stages_of(keras.Model(inputs, Scaled()(Scaled()(inputs))), 2)[rank]
        stage.free_other_stages()
        specs = boundary_specs(stage.whole.cut, stage.model_inputs(np.ones((3, 7, 4), "float32")), 0)
        assert [spec.shape for spec in specs] == [(None, 7, 4)]


def test_random_draws_are_those_of_the_whole_model():
    model = transformer((8,), 20, 0, depth=2, width=16, heads=2, dropout=0.1)
    whole = TrainState(model, keras.optimizers.SGD(), 7)
    expected = whole.generator_states(1, 5)
    for stage in stages_of(model, 2):
        states = TrainState(stage, keras.optimizers.SGD(), 7).generator_states(1, 5)
        assert 0 < len(states) < len(expected)
        assert all((states[path].numpy() == expected[path].numpy()).all() for path in states)


def test_a_stage_is_not_the_model_and_says_so():
    stage = stages_of(sequential(), 2)[0]
    with pytest.raises(
        ConfigError, match=r"are on 2 ranks, and none of them can call the model alone: use Trainer\.pre"
    ):
        stage(np.ones((1, 6)))
    for save in (lambda: stage.save("m.keras"), lambda: stage.save_weights("m.weights.h5"), lambda: stage.export("m")):
        with pytest.raises(ConfigError, match=r"rank of a pipeline holds a part of .* checkpoint export"):
            save()


def transferred():
    hidden = [layers.Dense(4) for _ in range(3)]
    backbone = keras.Sequential([keras.Input((6,)), *hidden], name="backbone")
    return keras.Sequential([keras.Input((6,)), backbone, layers.Dense(2)])


class Branch(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@pytest.mark.parametrize(
    ("build", "stages", "names", "cause"),
    [
        (Branch, 2, (), r"cuts Functional and Sequential models.* Received: Branch 'branch.*': write it with keras"),
        (lambda: keras.Sequential([layers.Dense(3)]), 2, (), r"has no keras\.Input: begin it with one"),
        (sequential, 6, (), r"cannot be cut into 6 stages that each have weights to train\. Received: 5 layers"),
        (
            transferred,
            3,
            (),
            r"Received: 2 layers .*layers of the model 'backbone', .* head\(backbone\.outputs\[0\]\)\)",
        ),
        (sequential, 3, ("x",), r"pipeline_stages names the first layer of each .*: 2 for 3 stages\. Received: x\."),
        (sequential, 2, ("nothing",), r"calls no layer 'nothing', which pipeline_stages names"),
        (lambda: mlp((4,), 3, 0), 2, ("flatten",), r"in the order in which the model calls them, and not its first"),
        (lambda: mlp((4,), 3, 0), 3, ("logits", "hidden1"), r"in the order in which the model calls them"),
        (lambda: mlp((4,), 3, 0), 2, ("hidden0",), r"Stage 0 of pipeline_stages has no weights to train"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(build, stages, names, cause):
    with pytest.raises(ConfigError, match=cause):
        cut_model(build(), stages, names)


def test_samples_of_any_length_are_refused_between_stages_but_not_at_the_ends():
    inputs = keras.Input((None,), dtype="int32")
    model = keras.Model(inputs, layers.Dense(2)(layers.Embedding(20, 4)(inputs)))
    cut = cut_model(model, 2)
    known = {id(cut.graph.inputs[0]): tf.ones([3, 8], tf.int32)}
    assert boundary_specs(cut, known, 0)[0].shape == (None, 8, 4)
    unknown = {id(cut.graph.inputs[0]): SimpleNamespace(shape=tf.TensorShape([None, None]))}
    with pytest.raises(ConfigError, match=r"between stages 0 and 1 with the shape \[None, None, 4\]\. Pad the samples"):
        boundary_specs(cut, unknown, 0)


class TwoRanks(NoOpCollectives):
    """A backend on whose mesh two ranks lie along pp."""

    axes: Mapping[str, int] = {"pp": 2}


def test_layers_that_stages_cannot_call_are_refused():
    penalized = keras.Sequential([keras.Input((6,)), layers.Dense(3, activity_regularizer="l2"), layers.Dense(3)])
    stage = stages_of(penalized, 2)[0]
    with pytest.raises(ConfigError, match=r"adds a loss of its activations .* leave that loss out"):
        stage.run_stage(0, stage.model_inputs(np.ones((2, 6))), [], training=True)


@pytest.mark.parametrize("layer", [layers.BatchNormalization, lambda: layers.Dropout(0.1, seed=1)])
def test_a_layer_with_a_state_is_not_called_by_several_stages(layer):
    inputs, shared = keras.Input((6,)), layer()
    model = keras.Model(inputs, shared(layers.Dense(6)(layers.Dense(6)(shared(inputs)))))
    with pytest.raises(ConfigError, match=r"each change a copy\. Received: a layer that stages 0 and 1 call"):
        staged(model, TwoRanks(), step_options({}))
    staged(keras.Model(inputs, layers.Dense(6)(shared(layers.Dense(6)(inputs)))), TwoRanks(), step_options({}))


def test_the_start_says_how_a_pipeline_is_cut():
    stage = stages_of(transformer((8,), 20, 0, depth=4, width=16, heads=2), 2)[0]
    said = pipeline_notes(stage, step_options({"accumulate": 2}))
    assert re.match(r"note: 2 stages begin with ones_like\w* \(", said[0])
    assert "block2_attention_norm (" in said[0]
    assert "idle for at least 33 %" in said[0]
    assert "use accumulate=8 or more" in in_script(said[1])
    assert len(pipeline_notes(stage, step_options({"accumulate": 8}))) == 1
