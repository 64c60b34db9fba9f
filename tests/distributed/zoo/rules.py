"""A model with each of Keras' optimizers, schedules, regularizers, constraints and callbacks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import callbacks, constraints, layers, optimizers, regularizers

from zoo.cases import ALWAYS, LOOSE, SAMPLES, SERVED, ZERO, Case

RNG = np.random.default_rng(2)
NUMBERS, TARGETS = RNG.integers(0, 7, (SAMPLES, 4)).astype("int32"), RNG.standard_normal((SAMPLES, 3))
VECTORS = RNG.standard_normal((SAMPLES, 5))


def normalized() -> keras.Model:
    """Matrices and vectors."""
    inputs = keras.Input((5,))
    hidden = layers.LayerNormalization()(layers.Dense(6, "tanh")(inputs))
    return keras.Model(inputs, layers.Dense(3)(hidden))


def embedded() -> keras.Model:
    """A sparse gradient, whose rows occur several times."""
    inputs = keras.Input((4,), dtype="int32")
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.Embedding(7, 4)(inputs))))


def falling() -> Any:
    return optimizers.schedules.ExponentialDecay(0.05, decay_steps=2, decay_rate=0.8)


def two_optimizers() -> Any:
    return optimizers.MultiOptimizer(
        optimizers.OptimizerMap(optimizers.Adam(0.01), {".*/bias": optimizers.SGD(0.1, momentum=0.9)})
    )


OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "Adadelta": lambda: optimizers.Adadelta(1.0, rho=0.9, clipvalue=0.5),
    "Adafactor": lambda: optimizers.Adafactor(0.05, beta_2_decay=-0.7, clip_threshold=0.9),
    "Adagrad": lambda: optimizers.Adagrad(0.1, initial_accumulator_value=0.2, global_clipnorm=0.5),
    "Adam": lambda: optimizers.Adam(falling(), beta_1=0.8, amsgrad=True, clipnorm=0.3),
    "AdamW": lambda: optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, ema_momentum=0.8),
    "Adamax": lambda: optimizers.Adamax(0.02, beta_2=0.9),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01, l2_regularization_strength=0.02, beta=0.1),
    "Lamb": lambda: optimizers.Lamb(0.05, weight_decay=0.01),
    "Lion": lambda: optimizers.Lion(0.01, beta_1=0.8),
    "LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1), initial_scale=8.0),
    "MultiOptimizer": two_optimizers,
    "Muon": lambda: optimizers.Muon(0.01, exclude_layers=["dense_1"]),
    "Nadam": lambda: optimizers.Nadam(0.02, beta_1=0.8),
    "RMSprop": lambda: optimizers.RMSprop(0.01, momentum=0.5, centered=True),
    "SGD": lambda: optimizers.SGD(falling(), momentum=0.9, nesterov=True, weight_decay=0.01),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.02, warmup_steps=2, weight_decay=0.01),
}
NO_OPTIMIZER = ("Optimizer",)
WHOLE = "looks at whole variables"
UNDER_ZERO: Mapping[str, str] = {
    **dict.fromkeys(("Adafactor", "Lamb", "MultiOptimizer", "Muon", "ScheduleFreeAdamW"), WHOLE),
    "Adagrad": f"(global_clipnorm=…), which {WHOLE}",
    "Adam": f"(clipnorm=…), which {WHOLE}",
}
UNDER_SERVERS: Mapping[str, str] = {
    "Adagrad": "(global_clipnorm=…) does not go with update='async'",
    "LossScaleOptimizer": "each worker would have a scale of its own",
    "MultiOptimizer": "each server updates its own variables",
    "ScheduleFreeAdamW": "has slots for whole variables already",
}
"""Words with which an optimizer is refused."""


def refused(name: str) -> dict[str, str]:
    tables = {ZERO: UNDER_ZERO, SERVED: UNDER_SERVERS}
    return {variation: table[name] for variation, table in tables.items() if name in table}


def refused_where_loose(name: str) -> dict[str, str]:
    """As `refused`, under update rules that train otherwise than one process."""
    loose = [each for each, options in LOOSE.items() if "update" in options or name == "LossScaleOptimizer"]
    return dict.fromkeys(loose, UNDER_SERVERS[name].removesuffix("'async'")) if name in UNDER_SERVERS else {}


SCHEDULES: Mapping[str, Callable[[], Any]] = {
    "CosineDecay": lambda: optimizers.schedules.CosineDecay(0.01, 4, alpha=0.1, warmup_target=0.1, warmup_steps=2),
    "CosineDecayRestarts": lambda: optimizers.schedules.CosineDecayRestarts(0.1, 2, t_mul=1.5, m_mul=0.9),
    "ExponentialDecay": lambda: optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True),
    "InverseTimeDecay": lambda: optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5),
    "PiecewiseConstantDecay": lambda: optimizers.schedules.PiecewiseConstantDecay([1, 3], [0.1, 0.05, 0.01]),
    "PolynomialDecay": lambda: optimizers.schedules.PolynomialDecay(0.1, 4, 0.01, power=2.0, cycle=True),
}
NO_SCHEDULE = ("LearningRateSchedule",)
REGULARIZERS: Mapping[str, Callable[[], Any]] = {
    "L1": lambda: regularizers.L1(0.02),
    "L1L2": lambda: regularizers.L1L2(0.01, 0.02),
    "L2": lambda: regularizers.L2(0.03),
    "OrthogonalRegularizer": lambda: regularizers.OrthogonalRegularizer(0.05, mode="columns"),
}
NO_REGULARIZER = ("Regularizer",)
CONSTRAINTS: Mapping[str, Callable[[], Any]] = {
    "MaxNorm": lambda: constraints.MaxNorm(0.5, axis=1),
    "MinMaxNorm": lambda: constraints.MinMaxNorm(0.2, 0.6, rate=0.7),
    "NonNeg": constraints.NonNeg,
    "UnitNorm": lambda: constraints.UnitNorm(axis=0),
}
NO_CONSTRAINT = ("Constraint",)
CALLBACKS: Mapping[str, Callable[[Path], Any]] = {
    "BackupAndRestore": lambda folder: callbacks.BackupAndRestore(str(folder / "backup")),
    "CSVLogger": lambda folder: callbacks.CSVLogger(str(folder / "log.csv"), separator=";"),
    "Callback": lambda folder: callbacks.Callback(),
    "EarlyStopping": lambda folder: callbacks.EarlyStopping(
        "loss", patience=0, baseline=0.0, restore_best_weights=True
    ),
    "History": lambda folder: callbacks.History(),
    "LambdaCallback": lambda folder: callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None),
    "LearningRateScheduler": lambda folder: callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
    "ModelCheckpoint": lambda folder: callbacks.ModelCheckpoint(
        str(folder / "{epoch}-{loss:.3f}.weights.h5"), monitor="loss", save_best_only=True, save_weights_only=True
    ),
    "ProgbarLogger": lambda folder: callbacks.ProgbarLogger(),
    "ReduceLROnPlateau": lambda folder: callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=0, min_delta=10.0),
    "SwapEMAWeights": lambda folder: callbacks.SwapEMAWeights(swap_on_epoch=True),
    "TensorBoard": lambda folder: callbacks.TensorBoard(str(folder / "board"), histogram_freq=1),
    "TerminateOnNaN": lambda folder: callbacks.TerminateOnNaN(),
}
WITHOUT_CALLBACK_CASE = {
    "CallbackList": "holds callbacks; `fit` makes it",
    "OrbaxCheckpoint": "needs the package orbax-checkpoint",
    "RemoteMonitor": "needs a server",
}


def dense(**arguments: Any) -> keras.Model:
    inputs = keras.Input((5,))
    return keras.Model(inputs, layers.Dense(3, **arguments)(layers.Dense(4, "tanh", **arguments)(inputs)))


def compiled_with(optimizer: Callable[[], Any]) -> Callable[[], Mapping[str, Any]]:
    return lambda: {"optimizer": optimizer(), "loss": "mse", "metrics": ["mae"]}


def optimizer_cases_in_32_bits() -> dict[str, Case]:
    """Return the cases of optimizers for all update rules; the table of docs has those in 64 bits."""
    return {
        name: replace(
            case,
            dtype="float32",
            unequal=dict.fromkeys(LOOSE, "ranks differ between two averages"),
            refused=refused(name) | refused_where_loose(name),
        )
        for name, case in optimizer_cases().items()
        if name in OPTIMIZERS
    }


def optimizer_cases() -> dict[str, Case]:
    found = {
        name: Case(
            normalized,
            VECTORS,
            TARGETS,
            compiled_with(make),
            built=name == "ScheduleFreeAdamW",
            refused=refused(name),
        )
        for name, make in OPTIMIZERS.items()
    }
    sparse = {"SGD": {}, "Adam": {ALWAYS: "rows of one index are added before they are squared; Keras squares each"}}
    for name, unequal in sparse.items():
        found[f"{name}, sparse"] = Case(
            embedded,
            NUMBERS,
            TARGETS,
            compiled_with(OPTIMIZERS[name]),
            unequal=unequal,
            refused=refused(name),
        )
    return {
        **found,
        **{
            n: Case(dense, VECTORS, TARGETS, compiled_with(lambda m=m: optimizers.SGD(m())))
            for n, m in SCHEDULES.items()
        },
    }


def rule_cases() -> dict[str, Case]:
    """Regularizers and constraints of a kernel and a bias, and regularizers of outputs."""
    found = {}
    for name, make in REGULARIZERS.items():
        orthogonal = name == "OrthogonalRegularizer"
        found[name] = Case(
            lambda make=make: dense(kernel_regularizer=make()),
            VECTORS,
            TARGETS,
            dtype="float32" if orthogonal else "float64",
        )
        if not orthogonal:
            found[f"{name} of outputs"] = Case(
                lambda make=make: dense(activity_regularizer=make(), bias_regularizer=make()), VECTORS, TARGETS
            )
    for name, make in CONSTRAINTS.items():
        found[name] = Case(lambda make=make: dense(kernel_constraint=make()), VECTORS, TARGETS)
    return found


def callback_cases() -> dict[str, Case]:
    def averaging() -> Any:
        return optimizers.SGD(0.1, use_ema=True, ema_momentum=0.7)

    return {
        name: Case(
            dense,
            VECTORS,
            TARGETS,
            compiled_with(averaging if name == "SwapEMAWeights" else lambda: optimizers.SGD(0.1)),
            callbacks=lambda folder, make=make: [make(folder)],
        )
        for name, make in CALLBACKS.items()
    }
