"""What is trained for a class of Keras, by `Model.fit` in this process and by the trainer on all ranks."""

import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp
from types import ModuleType
from typing import Any

import keras
import numpy as np
from as_keras import assert_same
from world import World, computing_in

import hvdtrain

STATES, EVALUATED = "states", "evaluated.json"
"""Files that a training leaves which is resumed: checkpoints, and what its end was evaluated to."""
SAMPLES, BATCH, EPOCHS = 21, 8, 2
"""Three steps an epoch, the last of five samples: three for the first of two ranks, two for the second."""
ALWAYS, RANKS, ACCUMULATE, ZERO, SYNC, RESTORE = "always", "ranks", "accumulate", "zero", "sync", "restore"
SERVED = "served"
TRAINED_ALONE = (ACCUMULATE, SERVED)
"""Variations that do not concern evaluation and prediction, which `RANKS` compares."""
LOOSE: Mapping[str, Mapping[str, Any]] = {
    "local steps": {"local_steps": 2},
    "stale": {"update": "async"},
    "gossip": {"update": "gossip"},
    "easgd": {"update": "easgd"},
}
"""Variations of which none trains as one process does."""
VARIATIONS: Mapping[str, Mapping[str, Any]] = {
    RANKS: {},
    ACCUMULATE: {"accumulate": 2},
    ZERO: {"zero": 3},
    SYNC: {"sync_batch_norm": True},
    RESTORE: {},
    SERVED: {"update": "async", "max_staleness": 0},
    **LOOSE,
}


def sgd_and_mse() -> dict[str, Any]:
    return {"optimizer": keras.optimizers.SGD(0.1), "loss": "mse"}


@dataclass(frozen=True)
class Case:
    """A training, and where it is not Keras'.

    `unequal` and `refused` say so for variations of it (keys of `VARIATIONS`; `RANKS` for all on more than one rank,
    `ALWAYS` for all): why figures differ, and the words with which the trainer refuses. An empty string takes one out.
    """

    build: Callable[[], keras.Model]
    x: Any
    y: Any
    compiled: Callable[[], Mapping[str, Any]] = sgd_and_mse
    weights: np.ndarray | None = None
    callbacks: Callable[[Path], Sequence[Any]] = lambda folder: []
    options: Mapping[str, Any] = field(default_factory=dict)
    built: bool = False
    """Whether the optimizer is built before: `Model.fit` loses what ScheduleFreeAdamW assigns then."""
    dtype: str = "float64"
    """What Keras computes in; another one where it lacks the arithmetic in 64 bits."""
    compares_samples: bool = False
    """Whether a sample's loss depends on the others of a rank's slice, in evaluation too."""
    unequal: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def declares(self, variation: str) -> bool:
        return variation in self.unequal or variation in self.refused

    def declared(self, table: Mapping[str, str], variation: str, size: int) -> str:
        keys = [ALWAYS, *([variation] if variation != RANKS else []), *([RANKS] if size > 1 else [])]
        return next((table[key] for key in keys if key in table), "")

    def model(self) -> keras.Model:
        # Layers have the same names. What Keras leaves of a `fit` lives on: looking through it took most of the time.
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(0)
        model = self.build()
        model.compile(**self.compiled())
        if self.built:
            model.optimizer.build(model.trainable_variables)
        return model

    @property
    def tolerance(self) -> float:
        return 1e-10 if self.dtype == "float64" else 2e-6

    def fit_arguments(self, **more: Any) -> dict[str, Any]:
        return {"x": self.x, "y": self.y, "sample_weight": self.weights, "shuffle": False, "verbose": 0, **more}


@dataclass(frozen=True)
class Result:
    """What a training leaves: weights, figures, and the files of callbacks."""

    weights: list[np.ndarray]
    history: Mapping[str, Any]
    evaluated: Any
    predicted: Any
    files: Sequence[str]


def files_in(folder: Path) -> list[str]:
    names = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    return sorted(name for name in names if "tfevents" not in name)


def evaluated_by(trainer: Any, case: Case, **batch: int) -> tuple[Any, Any]:
    evaluated = trainer.evaluate(case.x, case.y, sample_weight=case.weights, verbose=0, **batch)
    return evaluated, trainer.predict(case.x, verbose=0, **batch)


def keras_result(cases: Callable[[], Mapping[str, Case]], name: str) -> Result:
    case = cases()[name]
    model, folder = case.model(), Path(mkdtemp())
    arguments = case.fit_arguments(epochs=EPOCHS, batch_size=BATCH, callbacks=case.callbacks(folder))
    history = model.fit(**arguments).history
    weights = [np.array(each) for each in model.get_weights()]
    files = files_in(folder)
    shutil.rmtree(folder)
    return Result(weights, history, *evaluated_by(model, case, batch_size=BATCH), files)


def trained(case: Case, world: World, variation: str, folder: Path) -> tuple[Any, Mapping[str, Any]]:
    options = {"backend": world.backend, **case.options, **VARIATIONS[variation]}

    def fit(epochs: int, **more: Any) -> Mapping[str, Any]:
        arguments = case.fit_arguments(epochs=epochs, batch=BATCH, callbacks=case.callbacks(folder), **more)
        return trainer.fit(**arguments).history

    trainer = hvdtrain.Trainer(case.model(), **options)
    if variation == RESTORE:
        first = fit(1, checkpoint=folder / STATES)
        trainer = hvdtrain.Trainer(case.model(), **options)
        trainer.resume(folder / STATES)
        second = fit(EPOCHS, checkpoint=folder / STATES)
        return trainer, {name: [*first[name], *second[name]] for name in first}
    return trainer, fit(EPOCHS)


def compare(case: Case, world: World, variation: str, folder: Path, theirs: Result) -> None:
    """Raise what the trainer raises, or AssertionError where it differs from Keras.

    Where the training draws numbers or is declared as unequal, weights are made equal before they are used.
    """
    trainer, history = trained(case, world, variation, folder)
    model = trainer.model
    unequal = case.declared(case.unequal, variation, world.size)
    weights = [np.array(each) for each in model.get_weights()]
    if unequal:
        pairs = zip(weights, theirs.weights, strict=True)
        near = {"rtol": case.tolerance, "atol": case.tolerance}
        different = any(not np.allclose(ours, other, **near) for ours, other in pairs)
        assert different, f"equal by now, and declared as unequal: {unequal}"
        assert sorted(history) == sorted(theirs.history), f"{sorted(history)} for {sorted(theirs.history)}"
        model.set_weights(theirs.weights)
    else:
        assert_same(weights, theirs.weights, "weights", case.tolerance)
        assert_same(history, theirs.history, "history", case.tolerance)
    if variation not in TRAINED_ALONE:
        evaluated, predicted = evaluated_by(trainer, case, batch=BATCH)
        if not (unequal and case.compares_samples):
            assert_same(evaluated, theirs.evaluated, "evaluate", case.tolerance)
        assert_same(predicted, theirs.predicted, "predict", case.tolerance)
        if world.rank == 0 and variation == RESTORE and not unequal:
            (folder / EVALUATED).write_text(json.dumps(evaluated))
    if world.rank == 0 and variation != RESTORE:
        assert files_in(folder) == list(theirs.files), f"{files_in(folder)} for {theirs.files}"


def fault_of(case: Case, world: World, variation: str, folder: Path, theirs: Result) -> str:
    """Return how the case differs from what is declared for it, or nothing. Collective."""
    refused = case.declared(case.refused, variation, world.size)
    try:
        compare(case, world, variation, folder, theirs)
        fault = f"is not refused: {refused}" if refused else ""
    except Exception as error:  # whatever it is, it is one line of the sweep's report
        words = f"{type(error).__name__}: {error}"
        fault = "" if refused and refused in words else words
    faults = sorted({each.decode() for each in world.gather(fault.encode())} - {""})
    return " | ".join(faults)


def folder_of(world_folder: Path, name: str, variation: str) -> Path:
    return world_folder / f"{name}-{variation}"


def sweep(
    world: World, cases: Callable[[], Mapping[str, Case]], *variations: str, of: Iterable[str] | None = None
) -> None:
    """Train each of the cases, or those `of` these names, in each variation: as Keras, or as declared."""
    faults, every = {}, cases()
    names = list(every if of is None else of)
    for name in names[world.rank :: world.size]:  # each rank trains some by Keras, which all of them read then
        with computing_in(every[name].dtype), suppress(Exception):
            world.reference(keras_result, cases, name)
    for name in names:
        case = every[name]
        with computing_in(case.dtype):
            try:
                theirs = world.reference(keras_result, cases, name)
            except Exception as error:
                faults[f"{name}, in Keras"] = f"{type(error).__name__}: {error}"
                continue
            for variation in variations:
                folder = folder_of(world.folder, name, variation)
                folder.mkdir(exist_ok=True)
                fault = fault_of(case, world, variation, folder, theirs)
                if fault:
                    faults[f"{name}, {variation}"] = fault
    assert not faults, "\n".join(f"{name}: {fault}" for name, fault in faults.items())


def public_classes(module: ModuleType, base: type) -> dict[str, type]:
    """Return a module's classes under `base`, each once, by its own name where the module has it."""
    found: dict[type, str] = {}
    for name, value in sorted(vars(module).items()):
        if inspect.isclass(value) and issubclass(value, base) and found.get(value) != value.__name__:
            found[value] = name
    return {name: value for value, name in found.items()}


def assert_complete(classes: Mapping[str, type], *tables: Mapping[str, Any]) -> None:
    """Every class has a case, or a reason why it has none."""
    listed = [name for table in tables for name in table]
    assert len(listed) == len(set(listed)), sorted(name for name in listed if listed.count(name) > 1)
    missing, gone = sorted(set(classes) - set(listed)), sorted(set(listed) - set(classes))
    assert missing == gone == [], f"Keras has {missing}, which the zoo lacks, and no longer {gone}"
