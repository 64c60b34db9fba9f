"""Experts in the stages of a pipeline, in one process: what their routers add to the loss, and what is refused."""

import keras
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import check
from hvdtrain.data.batch import Batch
from hvdtrain.layers.embedding import ShardedEmbedding
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.parallel.pipeline.cut import cut_model
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from hvdtrain.runtime.placement import Placement, place
from hvdtrain.training.assembly import model_facts
from hvdtrain.training.pipelined.stage_training import adds_losses, shared_up_to
from hvdtrain.training.step.batches import Microbatches

layers = keras.layers
BEGIN = ("middle", "second", "last")
"""The layers that begin the stages behind the first one."""


def with_experts():
    """Four stages, of which the first and the third have a layer of experts."""
    x = inputs = keras.Input((3, 4))
    x = MixtureOfExperts(4, 6, seed=1, name="first")(x)
    x = layers.Dense(4, name="middle")(x)
    x = MixtureOfExperts(4, 6, top_k=2, seed=2, name="second")(x)
    return keras.Model(inputs, layers.Dense(2, name="last")(x))


def test_stages_add_the_losses_of_their_own_experts():
    model, x = with_experts(), tf.random.stateless_normal((2, 3, 4), (1, 2))
    cut = cut_model(model, 4, BEGIN)
    stages = [PipelineStage(model, cut, rank, 2) for rank in range(2)]
    passed, added = [], []
    for number in range(4):
        stage = stages[number % 2]
        made = stage.run_stage(number, stage.model_inputs(x), passed, training=True)
        passed = with_masks(cut, number, made)
        added.append(float(stage.pop_losses()))
    assert float(stages[0].pop_losses()) == 0, "a loss counts once"
    model(x, training=True)
    assert [loss > 0 for loss in added] == [True, False, True, False]
    assert sum(added) == pytest.approx(float(tf.add_n(model.losses)), rel=1e-6)


def test_those_stages_know_what_losses_count_that_have_some_or_come_behind_one_that_has():
    cut = cut_model(with_experts(), 4, BEGIN)
    assert [adds_losses(cut, stage) for stage in range(4)] == [True, False, True, False]
    assert [shared_up_to(cut, stage) for stage in range(4)] == [True] * 4
    x = inputs = keras.Input((3, 4))
    x = MixtureOfExperts(4, 6, seed=1)(layers.Dense(4)(x))
    cut = cut_model(keras.Model(inputs, layers.Dense(2, name="last")(x)), 3)
    assert [shared_up_to(cut, stage) for stage in range(3)] == [False, True, True]


def test_divided_tables_in_stages_are_refused():
    table = ShardedEmbedding(8, 4, "row", name="users")
    model = keras.Sequential([keras.Input((3,), dtype="int32"), table, layers.Dense(2)])
    two_stages = Facts.on_mesh({"pp": 2, "ep": 2})
    check(facts=model_facts(two_stages, model))
    place(table.embeddings, Placement((16, 4), (slice(0, 8), slice(0, 4)), ("ep",), held_by=("ep",)))
    with pytest.raises(ConfigError, match=r"pp=2.* does not go with ShardedEmbedding 'users': .*Leave pp out"):
        check(facts=model_facts(two_stages, model))


def test_a_microbatch_behind_those_of_a_batch_counts_nothing():
    """An interleaved pipeline fills a short batch up to a multiple of its ranks."""
    batch = Batch(tf.ones([6, 1]), tf.range(6), None, 1.0, 6)
    parts = Microbatches(batch, 1, 2)
    assert parts.count == 3
    assert parts.take(2).has_samples == 1.0
    behind = parts.take(3)
    assert float(behind.has_samples) == 0
    assert len(behind.inputs) == 1
