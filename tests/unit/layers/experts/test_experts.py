"""The router, its losses and the layer of experts, against loops over tokens in NumPy."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.facts import Facts
from hvdtrain.layers import slices
from hvdtrain.layers.embedding import ShardedEmbedding
from hvdtrain.layers.exchanging import exchanging_layers, samples_of
from hvdtrain.layers.experts import (
    MixtureOfExperts,
    expert_capacity,
    from_experts,
    load_balance_loss,
    load_of,
    router_z_loss,
    routes_of,
    routing_metrics,
    slots_of,
    to_experts,
)
from hvdtrain.runtime.placement import Placement, place, placement_of, whole_box
from hvdtrain.training.assembly import model_facts


def softmax(logits):
    exps = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def drawn(tokens=13, experts=4, seed=0):
    return np.random.default_rng(seed).standard_normal((tokens, experts))


def queued(probabilities, top_k, capacity):
    """Return (token, choice) -> (expert, gate, place or None): first choices queue before second ones."""
    best = np.argsort(-probabilities, axis=1)[:, :top_k]
    lengths, routes = [0] * probabilities.shape[1], {}
    for choice in range(top_k):
        for token, row in enumerate(best):
            expert = row[choice]
            gate = probabilities[token, expert]
            if top_k > 1:
                gate = gate / probabilities[token, row].sum()
            routes[token, choice] = expert, gate, lengths[expert] if lengths[expert] < capacity else None
            lengths[expert] += 1
    return routes, lengths


@pytest.mark.parametrize(
    ("tokens", "top_k", "factor", "expected"),
    [
        (64, 1, 1.0, 16),
        (64, 1, 1.25, 20),
        (63, 1, 1.0, 16),
        (64, 2, 1.25, 40),
        (3, 1, 0.1, 1),
        (8, 2, 9.0, 8),
        (7, 2, None, 7),
    ],
)
def test_the_capacity_of_an_expert_is_its_even_share_times_the_factor(tokens, top_k, factor, expected):
    assert expert_capacity(tokens, 4, top_k, factor) == expected
    assert int(expert_capacity(tf.constant(tokens), 4, top_k, factor)) == expected


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("capacity", [1, 3, 13])
def test_tokens_queue_at_their_experts_in_order_and_first_choices_first(top_k, capacity):
    probabilities = softmax(drawn())
    routes = routes_of(tf.constant(probabilities), top_k, capacity)
    expected, lengths = queued(probabilities, top_k, capacity)
    for (token, choice), (expert, gate, spot) in expected.items():
        assert routes.experts[token, choice] == expert
        assert float(routes.gates[token, choice]) == pytest.approx(gate)
        assert bool(routes.kept[token, choice]) == (spot is not None)
        if spot is not None:
            assert routes.positions[token, choice] == spot
    np.testing.assert_array_equal(load_of(routes.experts, 4), lengths)
    dropped = sum(max(0, length - capacity) for length in lengths)
    assert int(tf.reduce_sum(tf.cast(~routes.kept, tf.int32))) == dropped


def test_losses_of_the_router():
    logits = drawn()
    probabilities = softmax(logits)
    shares = np.bincount(probabilities.argmax(axis=1), minlength=4) / 13
    balance = load_balance_loss(tf.constant(probabilities), tf.constant(shares))
    assert float(balance) == pytest.approx(4 * sum(shares[e] * probabilities[:, e].mean() for e in range(4)))
    assert float(load_balance_loss(tf.fill([8, 4], 0.25), tf.fill([4], 0.25))) == 1.0
    z = np.mean(np.log(np.exp(logits).sum(axis=1)) ** 2)
    assert float(router_z_loss(tf.constant(logits))) == pytest.approx(z)


def test_tokens_lie_in_their_slots_and_come_back_weighted():
    probabilities, tokens = softmax(drawn()), np.random.default_rng(1).standard_normal((13, 5))
    routes = routes_of(tf.constant(probabilities), 2, 4)
    places = slots_of(routes, 6)  # buffers may be longer than the capacity
    buffers = to_experts(tf.constant(tokens), places, 4, 6).numpy()
    expected, back = np.zeros((4, 6, 5)), np.zeros((13, 5))
    for (token, _), (expert, gate, spot) in queued(probabilities, 2, 4)[0].items():
        if spot is not None:
            expected[expert, spot] = tokens[token]
            back[token] += gate * (expert + 1) * tokens[token]
    np.testing.assert_array_equal(buffers, expected)
    outputs = tf.constant(buffers * np.arange(1, 5)[:, None, None])
    np.testing.assert_allclose(from_experts(outputs, places, routes.gates), back)


# -- the layer --


def layer_of(dtype="float64", **arguments):
    layer = MixtureOfExperts(4, 6, **{"seed": 3, "activation": "relu", "dtype": dtype, **arguments})
    layer.build((None, 7, 5))
    rng = np.random.default_rng(5)
    for variable in layer.trainable_variables:
        variable.assign(rng.standard_normal(variable.shape))
    return layer


def expected_output(layer, x, capacity):
    """Return what the layer should, and how many tokens are dropped, token by token."""
    values = {variable.name: variable.numpy() for variable in layer.trainable_variables}
    tokens = x.reshape(-1, x.shape[-1])
    routes, lengths = queued(softmax(tokens @ values["router"]), layer.top_k, capacity)
    out = np.zeros_like(tokens)
    for (token, _), (e, gate, spot) in routes.items():
        if spot is not None:
            hidden = np.maximum(tokens[token] @ values["kernel_in"][e] + values["bias_in"][e], 0)
            out[token] += gate * (hidden @ values["kernel_out"][e] + values["bias_out"][e])
    return out.reshape(x.shape), lengths


@pytest.mark.parametrize(("top_k", "factor", "capacity"), [(1, 1.0, 4), (2, 0.75, 6), (2, None, 14)])
def test_the_layer_is_the_weighted_sum_of_its_experts(top_k, factor, capacity):
    layer, x = layer_of(top_k=top_k, capacity_factor=factor), np.random.default_rng(2).standard_normal((2, 7, 5))
    for training, most in ((True, capacity), (False, 14)):
        expected, lengths = expected_output(layer, x, most)
        np.testing.assert_allclose(layer(x, training=training), expected, atol=1e-12)
        compiled = tf.function(
            lambda x, training=training: layer(x, training=training),
            input_signature=[tf.TensorSpec([None, 7, 5], tf.float64)],
        )
        np.testing.assert_allclose(compiled(x), expected, atol=1e-12)
    dropped = sum(max(0, length - capacity) for length in lengths)
    assert float(layer.counts.dropped) == 2 * dropped
    np.testing.assert_array_equal(layer.counts.load, 2 * np.array(lengths))


def test_gradients_are_those_of_finite_differences():
    layer, x = layer_of(top_k=2, capacity_factor=1.0, balance_weight=0.3, z_weight=0.2), drawn(14, 5).reshape(2, 7, 5)

    def loss():
        out = layer(tf.constant(x), training=True)
        return tf.reduce_sum(out * tf.cast(tf.range(5), tf.float64)) + layer.losses[0]

    with tf.GradientTape() as tape:
        value = loss()
    gradients = tape.gradient(value, [v.value for v in layer.trainable_variables])
    for variable, gradient in zip(layer.trainable_variables, gradients, strict=True):
        at = tuple(np.random.default_rng(8).integers(0, variable.shape))
        before, step = variable.numpy(), np.zeros(variable.shape)
        step[at] = 1e-6
        sides = []
        for sign in (1, -1):
            variable.assign(before + sign * step)
            sides.append(float(loss()))
        variable.assign(before)
        assert float(gradient[at]) == pytest.approx((sides[0] - sides[1]) / 2e-6, rel=1e-5, abs=1e-7)


def test_a_placeholder_adds_nothing_even_where_it_overflows():
    layer = layer_of()
    x = tf.fill([1, 7, 5], tf.constant(np.inf, tf.float64))
    assert exchanging_layers(keras.Sequential([layer])) == [layer]
    with samples_of([layer], tf.constant(0.0)), tf.GradientTape() as tape:
        out = layer(x, training=True)
        loss = tf.reduce_sum(out)
    kernels = [layer.kernel_in.value, layer.kernel_out.value, layer.bias_out.value]
    assert all(float(tf.reduce_max(abs(g))) == 0 for g in tape.gradient(loss, kernels))
    assert float(tf.reduce_sum(layer.counts.load)) == float(layer.counts.dropped) == 0
    assert layer.has_samples == 1.0


class Block(keras.layers.Layer):
    """A layer without a `build` of its own, in whose first call Keras builds the experts."""

    def __init__(self):
        super().__init__()
        self.experts = MixtureOfExperts(2, 3, capacity_factor=1.0)

    def call(self, x, training=False):
        return x + self.experts(x, training=training)


class OneOfTwo(NoOpCollectives):
    """The second of two ranks, for what exchanges nothing."""

    size, index = 2, 1


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("symbolic", [True, False])
def test_slices_inside_a_layer_have_their_places(symbolic, monkeypatch):
    monkeypatch.setattr(slices, "ranks_along", lambda *axes: OneOfTwo() if axes == ("ep",) else None)
    block = Block()
    block(keras.Input((3, 4)) if symbolic else tf.ones([2, 3, 4]))
    found = placement_of(block.experts.kernel_in)
    assert found is not None
    assert (found.global_shape, found.box[0], found.held_by) == ((2, 4, 3), slice(1, 2), ("ep",))
    assert placement_of(block.experts.router) is None


@pytest.mark.usefixtures("no_session")
@pytest.mark.parametrize(
    ("layer", "inputs", "axes", "refused"),
    [
        (MixtureOfExperts(2, 3, name="mine"), tf.ones([2, 4]), ("ep",), "ep"),
        (MixtureOfExperts(2, 3, name="mine"), tf.ones([2, 4]), ("tp",), "tp"),
        (MixtureOfExperts(2, 3, name="mine"), tf.ones([2, 4]), ("dp", "cp", "ep"), "dp, cp, ep"),
        (ShardedEmbedding(4, 3, name="mine"), tf.constant([1, 2]), ("ep",), "ep"),
        (ShardedEmbedding(4, 3, "none", name="mine"), tf.constant([1, 2]), ("ep",), None),
    ],
)
def test_layers_that_were_built_before_init_are_refused_among_several_ranks(layer, inputs, axes, refused, monkeypatch):
    layer(inputs)
    monkeypatch.setattr(slices, "ranks_along", lambda *along: OneOfTwo() if along == axes else None)
    if refused is None:
        layer(inputs)
        return
    with pytest.raises(ConfigError) as error:
        layer(inputs)
    assert str(error.value) == (
        f"{type(layer).__name__} 'mine' was built before hvdtrain.init(), as if this process were alone, and 2 ranks "
        f"share it along {refused}. Build the model after init."
    )


def test_narrow_tokens_are_routed_in_float32_and_come_back_narrow():
    layer = layer_of(dtype="mixed_float16")
    assert layer.router.value.dtype == tf.float32
    out = layer(np.random.default_rng(2).standard_normal((2, 7, 5)).astype("float16"), training=True)
    assert out.dtype == tf.float16
    assert layer.losses[0].dtype == tf.float32


def test_initial_values_depend_on_the_seed_alone(tmp_path):
    first, second, other = (MixtureOfExperts(4, 6, seed=seed) for seed in (3, 3, 4))
    for layer in (first, second, other):
        layer.build((None, 5))
    bound = np.sqrt(6 / (5 + 6))
    for mine, same, differs in zip(first.weights, second.weights, other.weights, strict=True):
        np.testing.assert_array_equal(mine, same)
        assert mine.name.startswith("bias") or np.abs(np.array(mine) - np.array(differs)).max() > 0.1
    assert 0.9 * bound < np.abs(first.kernel_in).max() < bound
    experts = np.array(first.kernel_in)
    assert np.abs(experts[0] - experts[1]).max() > 0.1


def test_a_model_with_experts_is_saved_and_loaded(tmp_path):
    x = np.random.default_rng(2).standard_normal((3, 7, 5)).astype("float32")
    model = keras.Sequential([keras.Input((7, 5)), MixtureOfExperts(4, 6, top_k=2, activation="relu")])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), model(x))
    assert loaded.layers[0].get_config() == model.layers[0].get_config()


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ({"experts": 0, "hidden": 4}, "needs positive sizes. Received: experts=0, hidden=4."),
        ({"experts": 4, "hidden": 4, "top_k": 3}, "1 or 2 of its experts. Received: top_k=3, experts=4."),
        ({"experts": 1, "hidden": 4, "top_k": 2}, "1 or 2 of its experts. Received: top_k=2, experts=1."),
        ({"experts": 4, "hidden": 4, "capacity_factor": 0}, "Received: capacity_factor=0, eval_capacity_factor=None."),
        ({"experts": 4, "hidden": 4, "z_weight": -1}, "Received: balance_weight=0.01, z_weight=-1."),
    ],
)
def test_what_makes_no_experts_is_refused(arguments, cause):
    with pytest.raises(ConfigError) as refused:
        MixtureOfExperts(**arguments)
    assert cause in str(refused.value)


def test_figures_are_those_since_the_last_time():
    layer, x = layer_of(capacity_factor=0.5, name="block"), np.random.default_rng(2).standard_normal((2, 7, 5))
    layer(x, training=True)
    layer(x, training=True)
    _, lengths = expected_output(layer, x, 2)
    figures = routing_metrics([layer], NoOpCollectives())
    dropped = 2 * sum(max(0, length - 2) for length in lengths)
    assert (float(figures["dropped_tokens"]), float(figures["dropped_share"])) == (dropped, dropped / 28)
    np.testing.assert_allclose(figures["expert_load_block"], np.array(lengths) / 14 * 4)
    assert float(routing_metrics([layer], NoOpCollectives())["dropped_tokens"]) == 0
    assert routing_metrics([], NoOpCollectives()) == {}


def test_facts_of_a_model_name_experts_on_several_ranks():
    model = keras.Sequential([keras.Input((5,)), MixtureOfExperts(4, 6, name="experts")])
    facts = model_facts(Facts(), model)
    assert (facts.experts, facts.exchanging_layer, facts.split, facts.divided_layer) == ("", "", "", "")
    kernel = model.layers[0].kernel_in
    place(kernel, Placement((8, 5, 6), whole_box(kernel.shape), ("ep",), held_by=("ep",)))
    facts = model_facts(Facts(), model)
    assert facts.experts.endswith("experts/kernel_in")
    assert facts.divided_layer == "MixtureOfExperts 'experts'"
    assert facts.sharded_table == ""
    model.layers[0]._replicas = NoOpCollectives()
    assert model_facts(Facts(), model).exchanging_layer == "MixtureOfExperts 'experts'"
