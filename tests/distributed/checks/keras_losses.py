"""Losses and figures of every kind, against `Model.fit` and `Model.evaluate` of Keras in one process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
from world import World, computing_in, flat_bytes
from worlds import worlds

import hvdtrain

SAMPLES, BATCH, EPOCHS = 44, 8, 4  # five full batches and one of 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=(SAMPLES, 6))
VALUES = RNG.normal(size=(SAMPLES, 1))
WEIGHTS = RNG.random(SAMPLES) * (RNG.random(SAMPLES) > 0.3)
TOKENS = RNG.integers(0, 9, (SAMPLES, 7)) * (RNG.random((SAMPLES, 7)) > 0.3)
CLASSES = RNG.integers(0, 3, SAMPLES)
TAGS = RNG.integers(0, 5, (SAMPLES, 7))
SOME_IGNORED = np.where(np.arange(SAMPLES) < 10, -1, RNG.integers(-1, 4, SAMPLES))

Case = tuple[keras.Model, dict[str, Any], tuple[Any, ...]]
"""A model, the arguments of its `compile`, and x, y and sample weights."""


class MeanPenalty(keras.layers.Layer):
    """Adds a mean over the samples, and keeps a figure of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = keras.metrics.Mean(name="rate")

    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * keras.ops.mean(x**2))
        self.rate.update_state(x**2)
        return x


class SumPenalty(keras.layers.Layer):
    """Adds a sum over the samples."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(x**2))
        return x


class EachPenalty(keras.layers.Layer):
    """Adds one value for each sample, which Keras sums."""

    def call(self, x: Any) -> Any:
        self.add_loss(0.01 * keras.ops.sum(x**2, axis=-1))
        return x


def cross_entropy(**options: Any) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def perceptron(*layers: Any, outputs: int = 1, **options: Any) -> keras.Model:
    hidden = [keras.layers.Dense(8, "tanh"), *layers]
    return keras.Sequential([keras.Input((6,)), *hidden, keras.layers.Dense(outputs, **options)])


def tagger() -> tuple[Any, Any]:
    tokens = keras.Input((7,), dtype="int32")
    embedded = keras.layers.Embedding(9, 6, mask_zero=True)(tokens)
    return tokens, keras.layers.LSTM(5, return_sequences=True)(embedded)


def masked_sequence() -> Case:
    tokens, hidden = tagger()
    model = keras.Model(tokens, keras.layers.Dense(5, kernel_regularizer="l2")(hidden))
    return model, {"loss": cross_entropy(), "metrics": ["accuracy"]}, (TOKENS, TAGS)


def masked_sequence_beside_another_output() -> Case:
    tokens, hidden = tagger()
    pooled = keras.layers.GlobalAveragePooling1D()(hidden)
    outputs = {
        "intent": keras.layers.Dense(3, name="intent")(pooled),
        "slots": keras.layers.Dense(5, name="slots")(hidden),
    }
    losses = dict.fromkeys(outputs, cross_entropy())
    metrics = {name: ["accuracy"] for name in outputs}
    return (
        keras.Model(tokens, outputs),
        {"loss": losses, "metrics": metrics},
        (TOKENS, {"intent": CLASSES, "slots": TAGS}),
    )


def ignored_class() -> Case:
    return perceptron(outputs=4), {"loss": cross_entropy(ignore_class=-1)}, (X, SOME_IGNORED)


def mean_of_weights() -> Case:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    metrics = {"metrics": ["mae"], "weighted_metrics": ["mae"]}
    return perceptron(kernel_regularizer="l2"), {"loss": loss, **metrics}, (X, VALUES, WEIGHTS)


def sum_of_losses() -> Case:
    return perceptron(), {"loss": keras.losses.MeanSquaredError(reduction="sum")}, (X, VALUES)


def mean_over_the_batch() -> Case:
    """One number, beside an output's values for each sample."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [keras.layers.Dense(1, name=name)(inputs) for name in "ab"])
    return model, {"loss": [lambda y, p: keras.ops.mean(keras.ops.square(y - p)), "mae"]}, (X, [VALUES, VALUES])


def weights_of_samples() -> Case:
    return perceptron(), {"loss": "mse", "weighted_metrics": ["mae"]}, (X, VALUES, WEIGHTS)


def mean_that_a_layer_adds() -> Case:
    return perceptron(MeanPenalty()), {"loss": "mse", "metrics": ["mae"]}, (X, VALUES)


def sum_that_a_layer_adds() -> Case:
    return perceptron(SumPenalty()), {"loss": "mse", "metrics": ["mae"]}, (X, VALUES)


def sum_that_a_layer_adds_below_a_dict_of_outputs() -> Case:
    inputs = keras.Input((6,))
    hidden = SumPenalty()(keras.layers.Dense(8, "tanh")(inputs))
    model = keras.Model(inputs, {name: keras.layers.Dense(1, name=name)(hidden) for name in "ab"})
    return model, {"loss": {"a": "mse", "b": "mae"}}, (X, {"a": VALUES, "b": VALUES})


def value_of_each_sample_that_a_layer_adds() -> Case:
    return perceptron(EachPenalty()), {"loss": "mse"}, (X, VALUES)


def target_in_a_list() -> Case:
    return perceptron(), {"loss": "mse"}, (X, [VALUES])


class Errors(keras.metrics.Metric):
    """Gives two values, one of which is a variable that it sums."""

    def __init__(self) -> None:
        super().__init__(name="of_errors")
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(keras.ops.sum(keras.ops.abs(y - p)))
        self.count.assign_add(keras.ops.size(y))

    def result(self) -> dict[str, Any]:
        return {"mean_error": self.total / self.count, "total_error": self.total + 0.0}


def metric_of_several_values() -> Case:
    return perceptron(), {"loss": "mse", "metrics": ["mae", Errors()], "weighted_metrics": [Errors()]}, (X, VALUES)


def metric_along_an_axis() -> Case:
    metrics = [keras.metrics.CosineSimilarity(axis=1), keras.metrics.R2Score()]
    return perceptron(), {"loss": "mse", "metrics": metrics}, (X, VALUES)


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "a partial, of logits": lambda: (partial(SPARSE, from_logits=True), None),
    "a partial of a partial": lambda: (partial(partial(SPARSE, from_logits=True), ignore_class=1), None),
    "a partial, of probabilities": lambda: (partial(SPARSE, from_logits=False), "softmax"),
    "a lambda": lambda: (lambda y, p: SPARSE(y, p, from_logits=True), None),
    "an object that sums": lambda: (cross_entropy(reduction="sum"), None),
    "a subclass": lambda: (Doubled(from_logits=True), None),
}
"""How cross-entropies are given; each makes a loss and the activation before it."""
SPARSE = keras.losses.sparse_categorical_crossentropy


class Doubled(keras.losses.SparseCategoricalCrossentropy):
    def call(self, y_true: Any, y_pred: Any) -> Any:
        return 2 * super().call(y_true, y_pred)


def form(name: str, classes: int) -> Case:
    loss, activation = FORMS[name]()
    model = perceptron(outputs=classes, activation=activation)
    return model, {"loss": loss}, (X, np.random.default_rng(classes).integers(0, classes, SAMPLES), WEIGHTS)


SUMS_OF_A_BATCH = (
    sum_that_a_layer_adds,
    sum_that_a_layer_adds_below_a_dict_of_outputs,
    value_of_each_sample_that_a_layer_adds,
)
"""Of a microbatch, where there are some (`whole_batch.check_microbatches_of_own_steps_are_batches`)."""
EXACT = (
    masked_sequence,
    ignored_class,
    mean_of_weights,
    sum_of_losses,
    mean_over_the_batch,
    weights_of_samples,
    mean_that_a_layer_adds,
    sum_that_a_layer_adds,
    sum_that_a_layer_adds_below_a_dict_of_outputs,
    value_of_each_sample_that_a_layer_adds,
    target_in_a_list,
    metric_of_several_values,
    metric_along_an_axis,
)
"""Cases that are equal with accumulation, too."""
OF_EVERY_KIND = (
    ignored_class,
    mean_of_weights,
    mean_over_the_batch,
    sum_that_a_layer_adds,
    metric_of_several_values,
)
"""Divided by labels, by weights, by the loss itself, and not at all."""


def compiled(case: Callable[..., Case], seed: int, *given: Any) -> tuple[keras.Model, dict[str, Any]]:
    """Return a model with weights, and the data as keyword arguments."""
    keras.utils.set_random_seed(seed)
    model, arguments, (x, y, *weights) = case(*given)
    model.compile(keras.optimizers.SGD(0.05), jit_compile=False, **arguments)
    model(x[:2])
    return model, {"x": x, "y": y, "sample_weight": weights[0] if weights else None}


def by_keras(
    case: Callable[..., Case], *given: Any
) -> tuple[list[np.ndarray], dict[str, list[float]], dict[str, float]]:
    """Return weights, History and the evaluation of one process."""
    with computing_in("float64"):
        model, data = compiled(case, 3, *given)
        history = model.fit(**data, batch_size=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
        scores = model.evaluate(**data, batch_size=BATCH, verbose=0, return_dict=True)
    return model.get_weights(), history, scores


def assert_same(world: World, case: Callable[..., Case], *given: Any, **options: Any) -> None:
    weights, history, scores = world.reference(by_keras, case, *given)
    with computing_in("float64"):
        model, data = compiled(case, 3 + world.rank, *given)
        trainer = hvdtrain.Trainer(model, backend=world.backend, **options)
        found = trainer.fit(**data, batch=BATCH, epochs=EPOCHS, shuffle=False, verbose=0).history
        own = trainer.evaluate(**data, batch=BATCH, verbose=0, return_dict=True)
    mine, label = trainer.model.get_weights(), f"{case.__name__} {given} {options}"
    assert world.same_everywhere(flat_bytes(mine)), label
    for ours, theirs in zip(mine, weights, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13, err_msg=label)
    for ours, theirs in ((found, history), (own, scores)):
        assert list(ours) == list(theirs), (label, list(ours), list(theirs))
        # Keras' losses of outputs are means over batches, and a microbatch is one.
        for name in [each for each in theirs if "accumulate" not in options or not each.endswith("_loss")]:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-11, atol=1e-15, err_msg=f"{label} {name}")


def check_losses_of_every_kind_are_those_of_keras(world: World) -> None:
    for case in OF_EVERY_KIND:
        assert_same(world, case)


def check_cross_entropies_of_few_and_of_many_classes_are_those_of_keras(world: World) -> None:
    """Which are computed in two ways."""
    for name, classes in (("a partial of a partial", 5), ("an object that sums", 70)):
        assert_same(world, form, name, classes)


@worlds("mpirun-2", "gloo-2", extended=True)
def check_cross_entropies_in_any_form_are_those_of_keras(world: World) -> None:
    for name in FORMS:
        for classes in (5, 70):
            assert_same(world, form, name, classes)


@worlds("mpirun-2", "gloo-4", extended=True)
def check_every_loss_is_that_of_keras(world: World) -> None:
    for case in (*EXACT, masked_sequence_beside_another_output):
        assert_same(world, case)


@worlds("mpirun-2", extended=True)
def check_every_loss_is_that_of_keras_with_microbatches_and_shards(world: World) -> None:
    for case in EXACT:
        if case not in SUMS_OF_A_BATCH:
            assert_same(world, case, accumulate=2)
        assert_same(world, case, zero=3)
