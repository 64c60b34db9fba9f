"""Data of `fit`, `evaluate` and `predict` of which each rank may be given its own part (`shard="rank"`)."""

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
    """Return the stream of this rank's own data; see `training_data`.

    Args:
        data: this rank's samples, which may be none; batches hold the samples of one rank.
        backend: the replicas.
        batch: samples of a step over all ranks; None where each rank has batches already.
        seed: decides the order of arrays, and of a PyDataset's batches.
        shuffle: whether these are shuffled.
        steps_per_epoch: steps of an epoch of data that do not end; finite Datasets are repeated.

    Raises:
        ConfigError: see `training_data`.
        DataError: no rank has samples, or those of two ranks differ in structure.
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
    """Return this rank's part of evaluation data; see `validation_batches`.

    Arrays that are the same on every rank are divided, also with `shard="rank"`.

    Args:
        data: all samples on every rank; this rank's own with `shard="rank"`.
        backend: the replicas.
        batch: samples of a step over all ranks, for arrays.
        steps: batches that are read, or all of them.
        shard: see `Trainer.fit`.
    """
    if shard is None or backend.processes == 1 or (is_arrays(data) and same_arrays(data, backend)):
        return validation_batches(first_batches(data, steps, batch), backend, batch=batch)
    return own_evaluation_data(data, backend, batch=batch, steps=steps)


def own_evaluation_data(
    data: Any, backend: Backend, *, batch: int, steps: int | None, what: str = "validation"
) -> RankEvaluation:
    """Return this rank's own evaluation data, in as many batches on every rank; see `evaluation_data`."""
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
    """Refuse samples of each rank's own where several ranks must be given the same.

    Raises:
        ConfigError: naming the axes of the mesh.
    """
    if backend.job_size > backend.processes:
        axes = ", ".join(f"{axis}={size}" for axis, size in backend.axes.items() if axis not in DATA_AXES)
        raise ConfigError(
            f'shard="rank" gives each rank samples of its own, and ranks along other axes than dp and ep take the same '
            f"ones. Received: {axes}. Give all samples to every rank, without shard."
        )


def _count(batches: Iterable[Batch]) -> int:
    """Return the number of batches, which are read if it is not known."""
    known = getattr(batches, "steps", None)
    if known is None and isinstance(batches, tf.data.Dataset):
        known = int(batches.cardinality())
    return known if known is not None and known >= 0 else sum(1 for _ in batches)
