import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.optim import OptimConfig
from hvdtrain.optim.averaging import averaged_weights, averages_weights
from hvdtrain.optim.optimizers import build_optimizer

RATE, KEPT = 0.1, 0.75


def make_model():
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])


def make_optimizer(name="sgd", ema=KEPT, *, scaled=False, **options):
    optimizer = build_optimizer(OptimConfig(name, learning_rate=RATE, ema=ema, **options), 100, 64)
    return keras.optimizers.LossScaleOptimizer(optimizer) if scaled else optimizer


def train(optimizer, model, steps, *, compiled=False):
    """Take steps with gradients that change, and return the trainable weights after each."""
    variables = model.trainable_variables
    optimizer.build(variables)

    def step(number):
        optimizer.apply([optimizer.scale_loss(tf.ones(v.shape) * number) for v in variables], variables)

    step = tf.function(step) if compiled else step
    seen = []
    for number in range(1, steps + 1):
        step(tf.constant(float(number)))
        seen.append([v.numpy() for v in variables])
    return seen


def average_reference(seen):
    average = seen[0]
    for weights in seen[1:]:
        average = [KEPT * a + (1 - KEPT) * w for a, w in zip(average, weights, strict=True)]
    return average


def values(model):
    return [w.numpy() for w in model.weights]


def trainable(model):
    return [v.numpy() for v in model.trainable_variables]


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scaling"])
def test_within_the_context_the_model_has_the_averages(scaled, compiled):
    model, optimizer = make_model(), make_optimizer(scaled=scaled)
    seen = train(optimizer, model, 4, compiled=compiled)
    before = values(model)
    with averaged_weights(optimizer, model):
        for got, expected in zip(trainable(model), average_reference(seen), strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert not equal(trainable(model), seen[-1])
    assert equal(values(model), before)


def test_the_first_average_is_the_weights_after_the_first_step():
    # Neither the zeros that Keras creates it with nor the weights from before the step enter it.
    model, optimizer = make_model(), make_optimizer()
    start = trainable(model)
    (after,) = train(optimizer, model, 1)
    with averaged_weights(optimizer, model):
        assert equal(trainable(model), after)
    assert not equal(after, start)


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "loss scaling"])
def test_before_the_first_step_the_model_keeps_its_weights(scaled):
    model, optimizer = make_model(), make_optimizer(scaled=scaled)
    before = values(model)
    with averaged_weights(optimizer, model):  # not even built
        assert equal(values(model), before)
    optimizer.build(model.trainable_variables)
    with averaged_weights(optimizer, model):
        assert equal(values(model), before)


def test_an_error_within_gives_the_weights_back():
    model, optimizer = make_model(), make_optimizer()
    train(optimizer, model, 3)
    before = values(model)

    def fail():
        with averaged_weights(optimizer, model):
            assert not equal(values(model), before)
            raise KeyError("within")

    with pytest.raises(KeyError, match="within"):
        fail()
    assert equal(values(model), before)


def test_a_visit_to_the_averages_leaves_no_trace_in_training():
    weights = []
    for visit in (False, True):
        model, optimizer = make_model(), make_optimizer("adam")
        for _ in range(3):
            train(optimizer, model, 1)
            if visit:
                with averaged_weights(optimizer, model):
                    model(np.ones((2, 3), "float32"))
        with averaged_weights(optimizer, model):
            weights.append(values(model))
        weights[-1] += values(model)
    assert equal(*weights)


def test_a_frozen_layer_does_not_shift_the_averages_of_others():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3), keras.layers.Dense(3)])
    optimizer = make_optimizer()
    seen = train(optimizer, model, 3)
    model.layers[0].trainable = False
    with averaged_weights(optimizer, model):
        for got, expected in zip(trainable(model), average_reference(seen)[2:], strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_wrappers_may_be_nested():
    class Wrapper:
        def __init__(self, inner):
            self.inner_optimizer = inner

    model, optimizer = make_model(), make_optimizer(scaled=True)
    train(optimizer, model, 3)
    before = values(model)
    assert averages_weights(Wrapper(optimizer))
    with averaged_weights(Wrapper(optimizer), model):
        assert not equal(values(model), before)
    assert equal(values(model), before)
