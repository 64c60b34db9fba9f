"""A model with each of Keras' losses, and one with each of its metrics."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import layers, losses, metrics

from zoo.cases import ACCUMULATE, RANKS, SAMPLES, SERVED, Case

RNG = np.random.default_rng(1)
STEPS, CLASSES = 5, 4
WEIGHTS = RNG.uniform(0.2, 2.0, (SAMPLES, STEPS))
LABELS = RNG.integers(0, CLASSES, (SAMPLES, STEPS))
VALUES = RNG.standard_normal((SAMPLES, STEPS, CLASSES))
TARGETS: Mapping[str, tuple[str | None, np.ndarray]] = {
    "values": (None, VALUES),
    "positive": ("softplus", np.exp(VALUES)),
    "binary": ("sigmoid", (VALUES > 0.3).astype("float64")),
    "signs": ("tanh", np.sign(VALUES)),
    "one_hot": ("softmax", np.eye(CLASSES)[LABELS]),
    "labels": ("softmax", LABELS),
    "logits": (None, LABELS),
    "one_hot_logits": (None, np.eye(CLASSES)[LABELS]),
}
"""The last activation, and targets for each step of a sequence."""


def inputs(mask: bool) -> np.ndarray:
    values = RNG.standard_normal((SAMPLES, STEPS, 3))
    if mask:
        for number in range(SAMPLES):
            values[number, STEPS - number % 3 :] = 0.0
    return values


PLAIN, ENDING_EARLY = inputs(mask=False), inputs(mask=True)


def network(activation: str | None, mask: bool, flat: bool = False) -> keras.Model:
    given = keras.Input((STEPS, 3))
    hidden = layers.Masking()(given) if mask else given
    hidden = layers.Dense(6, "tanh")(hidden)
    outputs = layers.Dense(CLASSES, activation)(layers.Flatten()(hidden) if flat else hidden)
    return keras.Model(given, outputs)


def case_of(kind: str, compiled: Callable[[], Mapping[str, Any]], *, mask: bool = False, **more: Any) -> Case:
    activation, targets = TARGETS[kind]
    return Case(lambda: network(activation, mask), ENDING_EARLY if mask else PLAIN, targets, compiled, **more)


@dataclass(frozen=True)
class Objective:
    make: Callable[..., Any]
    kind: str
    unequal: Mapping[str, str] | None = None
    refused: Mapping[str, str] | None = None

    @property
    def declared(self) -> dict[str, Mapping[str, str]]:
        return {"unequal": self.unequal or {}, "refused": self.refused or {}}


LOSSES = {
    "BinaryCrossentropy": Objective(lambda **r: losses.BinaryCrossentropy(label_smoothing=0.1, **r), "binary"),
    "BinaryFocalCrossentropy": Objective(
        lambda **r: losses.BinaryFocalCrossentropy(apply_class_balancing=True, alpha=0.3, gamma=1.5, **r), "binary"
    ),
    "CategoricalCrossentropy": Objective(
        lambda **r: losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1, **r), "one_hot_logits"
    ),
    "CategoricalFocalCrossentropy": Objective(
        lambda **r: losses.CategoricalFocalCrossentropy(alpha=0.3, gamma=1.5, **r), "one_hot"
    ),
    "CategoricalGeneralizedCrossEntropy": Objective(
        lambda **r: losses.CategoricalGeneralizedCrossEntropy(q=0.4, **r), "labels"
    ),
    "CategoricalHinge": Objective(lambda **r: losses.CategoricalHinge(**r), "one_hot"),
    "CosineSimilarity": Objective(lambda **r: losses.CosineSimilarity(axis=1, **r), "values"),
    "Dice": Objective(lambda **r: losses.Dice(axis=(1, 2), **r), "binary"),
    "Hinge": Objective(lambda **r: losses.Hinge(**r), "signs"),
    "Huber": Objective(lambda **r: losses.Huber(delta=0.5, **r), "values"),
    "KLDivergence": Objective(lambda **r: losses.KLDivergence(**r), "one_hot"),
    "LogCosh": Objective(lambda **r: losses.LogCosh(**r), "values"),
    "MeanAbsoluteError": Objective(lambda **r: losses.MeanAbsoluteError(**r), "values"),
    "MeanAbsolutePercentageError": Objective(lambda **r: losses.MeanAbsolutePercentageError(**r), "positive"),
    "MeanSquaredError": Objective(lambda **r: losses.MeanSquaredError(**r), "values"),
    "MeanSquaredLogarithmicError": Objective(lambda **r: losses.MeanSquaredLogarithmicError(**r), "positive"),
    "Poisson": Objective(lambda **r: losses.Poisson(**r), "positive"),
    "SparseCategoricalCrossentropy": Objective(
        lambda **r: losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2, **r), "logits"
    ),
    "SquaredHinge": Objective(lambda **r: losses.SquaredHinge(**r), "signs"),
    "Tversky": Objective(lambda **r: losses.Tversky(alpha=0.3, beta=0.6, axis=(1, 2), **r), "binary"),
}
OWN_SHAPES = ("CTC", "Circle")
"""Losses with cases of their own below."""
NO_LOSS = ("Loss",)
BY_SAMPLE = ("Dice", "Tversky")
"""One number for each sample, so that a mask of steps does not fit."""
ALONG_STEPS = ("CosineSimilarity", "ConcordanceCorrelation", "PearsonCorrelation")
"""One number for each class of a sample."""
FUNCTIONS = {
    "binary_crossentropy": "binary",
    "binary_focal_crossentropy": "binary",
    "categorical_crossentropy": "one_hot",
    "categorical_focal_crossentropy": "one_hot",
    "categorical_hinge": "one_hot",
    "cosine_similarity": "values",
    "dice": "binary",
    "hinge": "signs",
    "huber": "values",
    "kl_divergence": "one_hot",
    "log_cosh": "values",
    "mean_absolute_error": "values",
    "mean_absolute_percentage_error": "positive",
    "mean_squared_error": "values",
    "mean_squared_logarithmic_error": "positive",
    "poisson": "positive",
    "sparse_categorical_crossentropy": "labels",
    "squared_hinge": "signs",
    "tversky": "binary",
}
"""Functions that are passed to `compile` as they are."""
OF_THE_BATCH = {"dice": "one number for all samples", "tversky": "one number for all samples"}


def compiled_with(loss: Any, **more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"optimizer": keras.optimizers.SGD(0.05), "loss": loss(), **more}


def loss_cases() -> dict[str, Case]:
    """Each class by itself, as a weighted sum, and as a weighted mean of a masked output; each function."""
    found = {}
    for name, loss in LOSSES.items():
        weights = {"weights": weights_for(name), **loss.declared}
        found[name] = case_of(loss.kind, compiled_with(loss.make), **loss.declared)
        found[f"{name}(reduction='sum')"] = case_of(
            loss.kind, compiled_with(lambda make=loss.make: make(reduction="sum")), **weights
        )
        found[f"{name}(reduction='mean_with_sample_weight')"] = case_of(
            loss.kind,
            compiled_with(lambda make=loss.make: make(reduction="mean_with_sample_weight")),
            mask=name not in (*BY_SAMPLE, *ALONG_STEPS),
            **weights,
        )
    for name, kind in FUNCTIONS.items():
        found[f"losses.{name}"] = case_of(
            kind, compiled_with(lambda name=name: getattr(losses, name)), mask=False, **declared_function(name)
        )
    found["Circle"] = Case(
        lambda: keras.Sequential([network(None, mask=False, flat=True), layers.UnitNormalization()]),
        PLAIN,
        LABELS[:, 0],
        compiled_with(lambda: losses.Circle(gamma=2.0, margin=0.3)),
        compares_samples=True,
        unequal={
            ACCUMULATE: "compares the samples of a micro-batch with one another",
            SERVED: "compares the samples of a rank's slice with one another; said at the start",
        },
    )
    found["CTC"] = Case(
        lambda: network(None, mask=False),
        PLAIN,
        1 + LABELS[:, :2] % (CLASSES - 1),
        compiled_with(losses.CTC),
        dtype="float32",
    )
    return found


def declared_function(name: str) -> dict[str, Mapping[str, str]]:
    if name not in OF_THE_BATCH:
        return {}
    return {"refused": {RANKS: "returns one number for the whole batch"}}


METRICS = {
    "AUC": Objective(lambda: metrics.AUC(num_thresholds=20, curve="PR", multi_label=True, num_labels=4), "binary"),
    "Accuracy": Objective(metrics.Accuracy, "binary"),
    "BinaryAccuracy": Objective(lambda: metrics.BinaryAccuracy(threshold=0.4), "binary"),
    "BinaryCrossentropy": Objective(lambda: metrics.BinaryCrossentropy(label_smoothing=0.1), "binary"),
    "BinaryIoU": Objective(lambda: metrics.BinaryIoU(target_class_ids=(1,), threshold=0.4), "binary"),
    "CategoricalAccuracy": Objective(metrics.CategoricalAccuracy, "one_hot"),
    "CategoricalCrossentropy": Objective(
        lambda: metrics.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1), "one_hot_logits"
    ),
    "CategoricalHinge": Objective(metrics.CategoricalHinge, "one_hot"),
    "ConcordanceCorrelation": Objective(lambda: metrics.ConcordanceCorrelation(axis=1), "values"),
    "CosineSimilarity": Objective(lambda: metrics.CosineSimilarity(axis=1), "values"),
    "F1Score": Objective(lambda: metrics.F1Score(average="macro", threshold=0.4), "binary"),
    "FBetaScore": Objective(lambda: metrics.FBetaScore(average="weighted", beta=2.0), "one_hot"),
    "FalseNegatives": Objective(lambda: metrics.FalseNegatives(thresholds=[0.3, 0.6]), "binary"),
    "FalsePositives": Objective(lambda: metrics.FalsePositives(thresholds=0.4), "binary"),
    "Hinge": Objective(metrics.Hinge, "signs"),
    "IoU": Objective(lambda: metrics.IoU(4, target_class_ids=[0, 2], ignore_class=1, sparse_y_pred=False), "labels"),
    "KLDivergence": Objective(metrics.KLDivergence, "one_hot"),
    "LogCoshError": Objective(metrics.LogCoshError, "values"),
    "MeanAbsoluteError": Objective(metrics.MeanAbsoluteError, "values"),
    "MeanAbsolutePercentageError": Objective(metrics.MeanAbsolutePercentageError, "positive"),
    "MeanIoU": Objective(lambda: metrics.MeanIoU(4, ignore_class=1, sparse_y_pred=False), "labels"),
    "MeanMetricWrapper": Objective(lambda: metrics.MeanMetricWrapper(losses.huber, "huber", delta=0.3), "values"),
    "MeanSquaredError": Objective(metrics.MeanSquaredError, "values"),
    "MeanSquaredLogarithmicError": Objective(metrics.MeanSquaredLogarithmicError, "positive"),
    "OneHotIoU": Objective(lambda: metrics.OneHotIoU(4, target_class_ids=[0, 2], ignore_class=1), "one_hot"),
    "OneHotMeanIoU": Objective(lambda: metrics.OneHotMeanIoU(4, ignore_class=1), "one_hot"),
    "PearsonCorrelation": Objective(lambda: metrics.PearsonCorrelation(axis=1), "values"),
    "Poisson": Objective(metrics.Poisson, "positive"),
    "Precision": Objective(lambda: metrics.Precision(thresholds=[0.3, 0.6], class_id=1), "binary"),
    "PrecisionAtRecall": Objective(lambda: metrics.PrecisionAtRecall(0.6, num_thresholds=20), "binary"),
    "R2Score": Objective(lambda: metrics.R2Score(class_aggregation="variance_weighted_average"), "values"),
    "Recall": Objective(lambda: metrics.Recall(top_k=2), "one_hot"),
    "RecallAtPrecision": Objective(lambda: metrics.RecallAtPrecision(0.4, num_thresholds=20), "binary"),
    "RootMeanSquaredError": Objective(metrics.RootMeanSquaredError, "values"),
    "SensitivityAtSpecificity": Objective(lambda: metrics.SensitivityAtSpecificity(0.6, 20), "binary"),
    "SparseCategoricalAccuracy": Objective(metrics.SparseCategoricalAccuracy, "labels"),
    "SparseCategoricalCrossentropy": Objective(
        lambda: metrics.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2), "logits"
    ),
    "SparseTopKCategoricalAccuracy": Objective(lambda: metrics.SparseTopKCategoricalAccuracy(k=2), "labels"),
    "SpecificityAtSensitivity": Objective(lambda: metrics.SpecificityAtSensitivity(0.6, 20), "binary"),
    "SquaredHinge": Objective(metrics.SquaredHinge, "signs"),
    "TopKCategoricalAccuracy": Objective(lambda: metrics.TopKCategoricalAccuracy(k=2), "one_hot"),
    "TrueNegatives": Objective(lambda: metrics.TrueNegatives(thresholds=[0.3, 0.6]), "binary"),
    "TruePositives": Objective(lambda: metrics.TruePositives(thresholds=0.4), "binary"),
}
NO_METRIC = ("Metric",)
IN_A_LAYER = ("Mean", "Sum")
"""Metrics that take one array: a layer updates them."""
UNWEIGHTED = ("BinaryIoU",)
"""They take weights of another shape than a loss of the same output."""
FLAT = ("F1Score", "FBetaScore", "R2Score", "AUC", "Recall")
"""They take one row for each sample."""


class Watched(layers.Layer):
    """Keeps the mean and the sum of what goes through it."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.total = metrics.Mean("watched_mean"), metrics.Sum("watched_sum")

    def call(self, values: Any) -> Any:
        self.mean.update_state(values)
        self.total.update_state(values)
        return values


def watched_model() -> keras.Model:
    model = network(None, mask=False)
    return keras.Model(model.inputs, Watched()(model.outputs[0]))


def metric_cases() -> dict[str, Case]:
    """Each class in `metrics` and in `weighted_metrics`, with weights of the samples."""
    found = {}
    for name, metric in METRICS.items():
        activation, targets = TARGETS[metric.kind]
        flat = name in FLAT
        make = metric.make

        def compiled(make: Callable[[], Any] = make) -> dict[str, Any]:
            return {**compiled_with(lambda: "mse")(), "metrics": [make()], "weighted_metrics": [make()]}

        labels = targets.ndim == 2
        found[name] = Case(
            lambda activation=activation, flat=flat: network(activation, mask=False, flat=flat),
            PLAIN,
            targets[:, 0] if flat else targets,
            (lambda compiled=compiled: {**compiled(), "loss": "sparse_categorical_crossentropy"})
            if labels
            else compiled,
            weights=None if name in UNWEIGHTED else weights_for(name),
            dtype="float32" if "TopK" in name else "float64",
            **metric.declared,
        )
    watched = Case(watched_model, PLAIN, VALUES, compiled_with(lambda: "mse"))
    return {**found, "Mean, Sum": watched}


def masked_metric_cases() -> dict[str, Case]:
    """The classes that take steps of sequences, on an output with a mask."""
    masked = {name: case for name, case in metric_cases().items() if name in METRICS and name not in FLAT}
    return {
        f"{name}, masked": replace(case, build=lambda kind=METRICS[name].kind: network(TARGETS[kind][0], mask=True))
        for name, case in masked.items()
        if METRICS[name].kind in ("values", "one_hot", "labels") and "IoU" not in name and name not in ALONG_STEPS
    }


def weights_for(name: str) -> np.ndarray:
    if name in ALONG_STEPS:
        return WEIGHTS[:, :1]
    return WEIGHTS[:, 0] if name in (*BY_SAMPLE, *FLAT) else WEIGHTS


def public_functions(module: Any) -> set[str]:
    return {name for name, value in vars(module).items() if inspect.isfunction(value) and name not in HELPERS}


HELPERS = ("deserialize", "get", "serialize")
NOT_BY_THEMSELVES = {
    "categorical_generalized_cross_entropy": "takes q, which the class has",
    "circle": "the class is compared",
    "ctc": "the class is compared",
}
"""Functions of losses without a case of their own."""
