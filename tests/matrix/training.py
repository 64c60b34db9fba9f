"""A row of the matrix by Keras alone, and by the Trainer on ranks."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np

import hvdtrain
from hvdtrain.training.update_rules.zero import shards
from tests.distributed.meshes import alone, on_mesh
from tests.distributed.world import World, computing_in
from tests.keras_io.train import same_draws
from tests.matrix.models import KINDS, Kind
from tests.matrix.rows import ROWS, Row

BATCH, EPOCHS, HALF = 16, 4, 2
"""Twenty steps."""
FIT: dict[str, Any] = {"shuffle": False, "verbose": 0}


class Outcome(NamedTuple):
    """What a training comes to."""

    losses: list[float]
    """Of its epochs."""
    evaluated: float
    predicted: np.ndarray


def by_keras(name: str) -> Outcome:
    """Train a row's model in this process, by `Model.fit`."""
    row = ROWS[name]
    kind = KINDS[row.model]
    with alone(), computing_in("float64"):
        model = _seeded(kind)
        model.compile(_optimizer(row, **row.alone), kind.loss)
        draws = [same_draws(model)]
        losses = model.fit(kind.x, kind.y, batch_size=BATCH, epochs=EPOCHS, callbacks=draws, **FIT).history["loss"]
        evaluated = model.evaluate(kind.x, kind.y, batch_size=BATCH, verbose=0)
        return Outcome(losses, evaluated, model.predict(kind.x, batch_size=BATCH, verbose=0))


def on_ranks(world: World, name: str) -> Outcome:
    """Train a row's model on all ranks, the second half by another Trainer where the row says so. Collective."""
    row, number = ROWS[name], list(ROWS).index(name)
    folder = world.folder / f"matrix-{number}"
    at_once = {"steps_per_execution": 3 if number % 2 else 1}  # which changes nothing
    options, resumed = {**at_once, **row.options}, {**at_once, **(row.resumed or {})}
    # Weights of small models are sharded, too.
    with computing_in("float64"), mock.patch.object(shards, "SMALL_BYTES", 64):
        if row.resumed is None:
            return _fitted(world, row, row.axes, options)
        first = _fitted(world, row, row.axes, options, epochs=HALF, saves=folder)
        axes = row.axes if row.resumed_axes is None else row.resumed_axes
        second = _fitted(world, row, axes, resumed, resumes=folder)
        return second._replace(losses=[*first.losses, *second.losses])


def _fitted(
    world: World,
    row: Row,
    axes: str,
    options: Any,
    *,
    epochs: int = EPOCHS,
    saves: Path | None = None,
    resumes: Path | None = None,
) -> Outcome:
    kind = KINDS[row.model]
    with on_mesh(world, axes) if axes else nullcontext(world) as mesh:
        build = partial(_seeded, kind)
        split = any(axis in axes for axis in ("tp", "cp", "pp"))
        model = partial(hvdtrain.parallelize, build, kind.layouts()) if split else build()
        trainer = hvdtrain.Trainer(model, _optimizer(row), kind.loss, backend=mesh.backend, **options)
        if resumes is not None:
            assert trainer.resume(resumes) is not None
        history = trainer.fit(kind.x, kind.y, batch=BATCH, epochs=epochs, checkpoint=saves, **FIT).history
        evaluated = trainer.evaluate(kind.x, kind.y, batch=BATCH, verbose=0)
        return Outcome(history["loss"], evaluated, trainer.predict(kind.x, batch=BATCH, verbose=0))


def _seeded(kind: Kind) -> keras.Model:
    keras.utils.set_random_seed(3)
    return kind.build()


def _optimizer(row: Row, **more: Any) -> Any:
    return keras.optimizers.SGD(**{"learning_rate": 0.1, "momentum": 0.9, **row.optimizer, **more})


def assert_equal(name: str, found: Outcome, right: Outcome) -> None:
    """Compare losses, evaluation and outputs of two trainings of a row."""
    digits = KINDS[ROWS[name].model].digits
    np.testing.assert_allclose(found.losses, right.losses, rtol=digits, err_msg="losses")
    np.testing.assert_allclose(found.evaluated, right.evaluated, rtol=digits, err_msg="evaluation")
    np.testing.assert_allclose(found.predicted, right.predicted, rtol=10 * digits, atol=digits, err_msg="outputs")
