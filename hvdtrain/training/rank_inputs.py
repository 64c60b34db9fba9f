"""Per-rank data of `fit`, `evaluate` and `predict` (`shard="rank"`)."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import ConfigError, NoSamplesError
from hvdtrain.config.parallel import DATA_AXES
from hvdtrain.data.batch import Batch, per_replica
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.data.streams.given import same_arrays
from hvdtrain.data.streams.rank_parts import RankEvaluation, RankTraining, agree_on_parts
from hvdtrain.runtime.session import current
from hvdtrain.training.data_arguments import first_batches, is_arrays
from hvdtrain.training.inputs import training_data, validation_batches


def rank_training_data(
    data: Any,
    backend: Backend,
    *,
    batch: int | None,
    seed: int,
    shuffle: bool,
    steps_per_epoch: int | None,
) -> TrainingData:
    """Return the stream of this rank's own data, possibly empty. Collective.

    Arguments as for `training_data`, but batches hold the samples of one rank, and finite Datasets are repeated with
    `steps_per_epoch`. Raises DataError if no rank has samples, or structures differ.
    """
    options: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "steps_per_epoch": steps_per_epoch}
    if backend.processes == 1:
        return training_data(data, backend, batch=batch, **options)
    _refuse_shared_samples(backend)
    rows = None if batch is None else per_replica(batch, backend.data_parallel.size)
    mine: TrainingData | None
    try:
        mine = training_data(data, SingleBackend(current()), batch=rows, **options)
    except NoSamplesError:
        mine = None
    first = None if mine is None else next(mine.batches(0))
    steps = 0 if mine is None else mine.steps_per_epoch
    return RankTraining(mine, agree_on_parts(first, steps, backend, "training"), backend.data_parallel.size)


def evaluation_data(
    data: Any, backend: Backend, *, batch: int, steps: int | None, shard: str | None
) -> Iterable[Batch]:
    """Return this rank's share of evaluation data. Collective.

    Arrays that are equal on all ranks are divided, even with `shard="rank"`; otherwise that means this rank's own
    samples. `batch` counts samples over all ranks, for arrays.
    """
    if shard is None or backend.processes == 1 or (is_arrays(data) and same_arrays(data, backend)):
        return validation_batches(first_batches(data, steps, batch), backend, batch=batch)
    return own_evaluation_data(data, backend, batch=batch, steps=steps)


def own_evaluation_data(
    data: Any, backend: Backend, *, batch: int, steps: int | None, what: str = "validation"
) -> RankEvaluation:
    """Return this rank's own evaluation data, padded to equally many batches. Collective."""
    _refuse_shared_samples(backend)
    rows = per_replica(batch, backend.data_parallel.size) if is_arrays(data) else batch
    try:
        named = first_batches(data, steps, rows)
        mine = validation_batches(named, SingleBackend(current()), batch=rows, what=what)
        first = next(iter(mine), None)
        count = 0 if first is None else _count(mine)
    except NoSamplesError:
        mine, first, count = (), None, 0
    return RankEvaluation(mine, agree_on_parts(first, count, backend, what))


def _refuse_shared_samples(backend: Backend) -> None:
    """Reject per-rank samples if several ranks need the same ones. Raises ConfigError naming the mesh axes."""
    if backend.job_size > backend.processes:
        axes = ", ".join(f"{axis}={size}" for axis, size in backend.axes.items() if axis not in DATA_AXES)
        raise ConfigError(
            f'shard="rank" gives each rank samples of its own, and ranks along other axes than dp and ep take the same '
            f"ones. Received: {axes}. Give all samples to every rank, without shard."
        )


def _count(batches: Iterable[Batch]) -> int:
    """Return the number of batches, iterating if unknown."""
    known = getattr(batches, "steps", None)
    if known is None and isinstance(batches, tf.data.Dataset):
        known = int(batches.cardinality())
    return known if known is not None and known >= 0 else sum(1 for _ in batches)
