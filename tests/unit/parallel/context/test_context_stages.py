"""Stages of a model whose sequences are split compute slices of what the whole model does; here on threads."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.context.positions import Positions, positions_of
from hvdtrain.parallel.context.split import split_sequences
from hvdtrain.parallel.pipeline.cut import cut_model
from hvdtrain.parallel.pipeline.exchange import boundary_specs
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from tests.unit.parallel.context.test_context_parallel import LENGTH, PADDED, SIZE, TOKENS, Unused, functional
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on

layers, ops = keras.layers, keras.ops
STAGES = 3


def masked(tokens):
    x = layers.Embedding(12, 8, mask_zero=True)(tokens)
    x = layers.MultiHeadAttention(2, 4)(x, x, use_causal_mask=True) + x
    return layers.Dense(5)(layers.MultiHeadAttention(4, 2)(x, x))


def with_places(tokens):
    """Positions of one sequence, which stages pass on with it where the cut is between them and their sum."""
    places = layers.Embedding(LENGTH, 8)(ops.cumsum(ops.ones_like(ops.slice(tokens, (0, 0), (1, LENGTH))), 1) - 1)
    x = layers.Embedding(12, 8)(tokens)
    return layers.Dense(5)(x + layers.MultiHeadAttention(2, 4)(x, x) + places)


@pytest.mark.parametrize(("build", "x"), [(masked, PADDED), (with_places, TOKENS)], ids=["masks", "places"])
def test_stages_pass_on_slices(build, x):
    whole = functional(build, x)
    y = whole(x).numpy()
    meeting = Meeting(SIZE)

    def body(rank):
        model = functional(build, x)
        split_sequences(model, Replica(meeting, rank), {})
        cut = cut_model(model, STAGES)
        stages = [PipelineStage(model, cut, place, STAGES) for place in range(STAGES)]
        passed = []
        for stage in stages:
            number = stage.place
            made = stage.run_stage(number, stage.model_inputs(x), [tf.identity(t) for t in passed], training=False)
            passed = with_masks(cut, number, made)
            if number + 1 < STAGES:
                specs = boundary_specs(cut, stage.model_inputs(x), number)
                assert [(t.shape[1:], t.dtype) for t in passed] == [(s.shape[1:], s.dtype) for s in specs]
                assert all(spec.shape[1] == LENGTH // SIZE for spec in specs if spec.dtype != tf.int32), specs
        outputs = stages[-1].outputs_of(passed[:1])
        assert positions_of(outputs) == Positions(rank, SIZE)
        assert boundary_specs(cut, stages[0].model_inputs(x), STAGES - 1)[0].shape == (None, LENGTH, 5)
        return stages[-1].whole_outputs(outputs).numpy()

    for found in outcomes_on(SIZE, body):
        np.testing.assert_allclose(found, y, rtol=1e-5, atol=1e-6)


def test_stages_of_sequences_of_any_length_are_refused():
    tokens = keras.Input((None,), dtype="int32")
    model = keras.Model(tokens, layers.Dense(2)(layers.Dense(4)(layers.Embedding(12, 4)(tokens))))
    split_sequences(model, Unused(), {}, inputs=TOKENS)
    with pytest.raises(ConfigError, match=r"slices of sequences along cp=2, .* of any length\. Give keras\.Input the"):
        cut_model(model, 2)
