import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.optim import OptimConfig
from hvdtrain.data.digits import load_digits
from hvdtrain.optim.lars import LARS
from hvdtrain.optim.optimizers import build_optimizer

# Keras keeps the rate in float32, which holds 0.75 exactly.
RATE, KEPT, DECAY, TRUST, EPSILON = 0.75, 0.9, 0.05, 0.01, 0.25


def lars_reference(weights, gradients, *, adapted=True, nesterov=False, rate=RATE):
    """Algorithm 1 of You et al. 2017 in float64."""
    velocity = np.zeros_like(weights)
    for gradient in gradients:
        step = rate * gradient
        if adapted:
            norm, size = np.sqrt((weights**2).sum()), np.sqrt((gradient**2).sum())
            ratio = TRUST * norm / (size + DECAY * norm + EPSILON) if norm > 0 and size > 0 else 1.0
            step = rate * ratio * (gradient + DECAY * weights)
        velocity = KEPT * velocity + step
        weights = weights - (KEPT * velocity + step if nesterov else velocity)
    return weights


def optimizer_of(**options):
    return LARS(RATE, KEPT, weight_decay=DECAY, trust_coefficient=TRUST, epsilon=EPSILON, **options)


def run(optimizer, variables, gradients, *, compiled=False):
    """Take one step for each list of gradients."""
    optimizer.build(variables)

    def step(*given):
        optimizer.apply(list(given), variables)

    step = tf.function(step) if compiled else step
    for given in gradients:
        step(*given)
    return [variable.numpy() for variable in variables]


@pytest.fixture
def problem():
    random = np.random.default_rng(1)
    weights = [random.normal(size=(5, 3)), random.normal(size=3)]
    gradients = [[random.normal(size=w.shape) for w in weights] for _ in range(5)]
    return weights, gradients


def variables_of(weights, dtype="float64"):
    return [keras.Variable(w, dtype=dtype, name=name) for w, name in zip(weights, ("kernel", "bias"), strict=True)]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_is_the_papers_algorithm(problem, nesterov, compiled):
    weights, gradients = problem
    given = [[tf.constant(g) for g in step] for step in gradients]
    got = run(optimizer_of(nesterov=nesterov), variables_of(weights), given, compiled=compiled)
    kernel = lars_reference(weights[0], [g[0] for g in gradients], nesterov=nesterov)
    assert got[0] == pytest.approx(kernel, rel=1e-9)
    assert np.abs(kernel - weights[0]).max() > 1e-2
    bias = lars_reference(weights[1], [g[1] for g in gradients], adapted=False, nesterov=nesterov)
    assert got[1] == pytest.approx(bias, rel=1e-9)


def test_the_movement_of_a_layer_does_not_depend_on_its_gradients_size(problem):
    weights, gradients = problem
    small = [[g * 1e-3 for g in step] for step in gradients]
    optimizers = [LARS(RATE, trust_coefficient=TRUST, epsilon=0.0) for _ in range(2)]
    a, b = (run(o, variables_of(weights), g)[0] for o, g in zip(optimizers, (gradients, small), strict=True))
    assert a == pytest.approx(b, rel=1e-9)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_sparse_gradients_count_their_duplicate_rows_once(problem, compiled):
    weights, _ = problem
    rows, values = [1, 3, 1], np.random.default_rng(2).normal(size=(3, 3))
    dense = np.zeros((5, 3))
    np.add.at(dense, rows, values)
    sparse = tf.IndexedSlices(tf.constant(values), tf.constant(rows), tf.constant([5, 3]))
    variable = variables_of(weights)[:1]
    got = run(optimizer_of(), variable, [[sparse]] * 3, compiled=compiled)
    assert got[0] == pytest.approx(lars_reference(weights[0], [dense] * 3), rel=1e-9)


@pytest.mark.parametrize("zero", ["weights", "gradient"])
def test_a_zero_norm_makes_the_ratio_one(problem, zero):
    weights, gradients = problem
    start = weights[0] * (zero != "weights")
    steps = [[g[0] * (zero != "gradient")] for g in gradients[:1]]
    got = run(optimizer_of(), variables_of([start, weights[1]])[:1], steps)
    assert got[0] == pytest.approx(start - RATE * (steps[0][0] + DECAY * start), rel=1e-9)


def test_lars_survives_saving(problem):
    weights, gradients = problem
    optimizer = LARS(0.3, 0.8, True, 0.02, 0.05, 1e-6, clipnorm=1.0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert type(again) is LARS
    assert again.get_config() == optimizer.get_config()
    assert (again.weight_decay, again.clipnorm, again.epsilon) == (0.02, 1.0, 1e-6)
    a, b = (run(o, variables_of(weights), gradients) for o in (optimizer, again))
    assert all((x == y).all() for x, y in zip(a, b, strict=True))


# -- Keras' LAMB --

# Keras rounds these to float32, which holds them exactly.
LAMB_RATE = 0.0625
BETAS = {"beta_1": 0.875, "beta_2": 0.96875}


def lamb_reference(weights, gradients, rate, decay=0.0, *, decoupled=False, epsilon=1e-7):
    """Algorithm 2 of You et al. 2019 in float64; `decoupled` takes the decay out of the trust ratio."""
    beta_1, beta_2 = BETAS.values()
    m = v = np.zeros_like(weights)
    for t, gradient in enumerate(gradients, 1):
        m = beta_1 * m + (1 - beta_1) * gradient
        v = beta_2 * v + (1 - beta_2) * gradient**2
        update = m / (1 - beta_1**t) / (np.sqrt(v / (1 - beta_2**t)) + epsilon)
        if decoupled:
            weights = weights - rate * decay * weights
        else:
            update = update + decay * weights
        norm, size = np.sqrt((weights**2).sum()), np.sqrt((update**2).sum())
        weights = weights - rate * (norm / size if norm > 0 and size > 0 else 1.0) * update
    return weights


@pytest.mark.parametrize("start", [1.0, 0.0], ids=["random", "zero"])
def test_lamb_is_the_papers_algorithm(problem, start):
    weights, gradients = problem
    optimizer = build_optimizer(OptimConfig("lamb", BETAS, learning_rate=LAMB_RATE), 10, 64)
    variables = variables_of([w * start for w in weights])
    got = run(optimizer, variables, gradients)
    for place, weight in enumerate(weights):
        expected = lamb_reference(weight * start, [g[place] for g in gradients], LAMB_RATE)
        assert got[place] == pytest.approx(expected, rel=1e-9)


def test_lambs_weight_decay_is_decoupled_and_not_the_papers(problem):
    weights, gradients = problem
    optimizer = build_optimizer(OptimConfig("lamb", BETAS, learning_rate=LAMB_RATE, weight_decay=0.5), 10, 64)
    got = run(optimizer, variables_of(weights), gradients)
    kernels, biases = ([g[place] for g in gradients] for place in (0, 1))
    assert got[0] == pytest.approx(lamb_reference(weights[0], kernels, LAMB_RATE, 0.5, decoupled=True), rel=1e-9)
    assert np.abs(got[0] - lamb_reference(weights[0], kernels, LAMB_RATE, 0.5)).max() > 1e-2
    assert got[1] == pytest.approx(lamb_reference(weights[1], biases, LAMB_RATE), rel=1e-9)  # a bias does not decay


@pytest.mark.parametrize("size", [1, 2])
def test_the_documented_numbers_train(size):
    """Too large a product of rate and trust coefficient diverges within 50 steps: 0.5 and 0.1 did, on two ranks."""
    page = (Path(__file__).parents[3] / "docs" / "own_loops.md").read_text(encoding="utf-8")
    (peak,) = re.findall(r"warmup_target=([\d.]+) \* hvdtrain\.size\(\)", page)
    (trust,) = re.findall(r"LARS\(rate, weight_decay=1e-4, trust_coefficient=([\d.]+)\)", page)
    keras.utils.set_random_seed(0)
    images, labels = load_digits()
    model = keras.Sequential(
        [keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)]
    )
    rate = keras.optimizers.schedules.CosineDecay(0.0, 100, warmup_target=float(peak) * size, warmup_steps=5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(LARS(rate, weight_decay=1e-4, trust_coefficient=float(trust)), loss)
    fitted = model.fit(images, labels, batch_size=32 * size, epochs=2 * size, verbose=0)
    assert fitted.history["loss"][-1] < 0.7
