"""Convert the data of `fit` and `evaluate` to streams of batches."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import SingleBackend
from hvdtrain.compat.tensorflow import batch_of, batches_in
from hvdtrain.config.errors import ConfigError, DataError, NoSamplesError
from hvdtrain.config.parallel import DATA_AXES
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import Batch, Change, check_division, count_of, per_replica
from hvdtrain.data.pipeline import SourceEvaluation, SourceTraining, TrainingData
from hvdtrain.data.streams.cut import Cut
from hvdtrain.data.streams.dataset_batches import DatasetTraining, evaluation_of_dataset
from hvdtrain.data.streams.given import (
    AsMany,
    Given,
    caches_of,
    check_given,
    check_order,
    content_of,
    draws,
    parts_of,
    refusing_shared_caches,
    same_arrays,
)
from hvdtrain.data.streams.python_batches import (
    FirstPass,
    GeneratorTraining,
    PyDatasetTraining,
    StreamEvaluation,
    is_stream,
    name_of,
    opened,
)
from hvdtrain.data.streams.rank_parts import RankEvaluation, RankTraining, agree_on_parts
from hvdtrain.data.streams.sharded_dataset import first_and_shards, length_of


def is_arrays(data: Any) -> bool:
    """Return whether `data` are arrays, as opposed to batches."""
    return not isinstance(data, tf.data.Dataset) and not is_stream(data)


def number_of_samples(data: Any) -> int:
    """Return the samples of arrays."""
    return data.size if isinstance(data, ArraySource) else len(tf.nest.flatten(data)[0])


def first_batches(data: Any, steps: int | None, batch: int) -> Any:
    """Return the first `steps` batches of evaluation data (arrays or batches); None: all."""
    if steps is None:
        return data
    if isinstance(data, tf.data.Dataset):
        return data.take(steps)
    if isinstance(data, keras.utils.PyDataset):
        return _FirstBatches(data, steps)
    if is_stream(data):
        return lambda: itertools.islice(iter(data()), steps)
    return as_source(data).part(slice(0, steps * batch), "validation data")


class _FirstBatches(keras.utils.PyDataset):
    """The first batches of a PyDataset."""

    def __init__(self, dataset: keras.utils.PyDataset, steps: int) -> None:
        super().__init__(dataset.workers, dataset.use_multiprocessing, dataset.max_queue_size)
        self._dataset = dataset
        self._steps = steps

    @property
    def num_batches(self) -> int:
        count = self._dataset.num_batches
        return self._steps if count is None else min(count, self._steps)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]

    def on_epoch_begin(self) -> None:
        self._dataset.on_epoch_begin()

    def on_epoch_end(self) -> None:
        self._dataset.on_epoch_end()


def as_source(data: Any) -> ArraySource:
    """Return arrays as a source."""
    return data if isinstance(data, ArraySource) else ArraySource(data)


def training_data(
    data: Any,
    backend: Backend,
    *,
    batch: int | None,
    seed: int,
    shuffle: bool,
    steps_per_epoch: int | None,
    starts_over: bool = False,
) -> TrainingData:
    """Return the stream of this replica's batches of `data`. Collective.

    Args:
        data: `(inputs, targets[, sample_weight])` arrays, an ArraySource, a tf.data.Dataset of such tuples, or global
            batches of them: a keras.utils.PyDataset, or a generator function. For a model's own `train_step`, inputs
            alone, `(inputs,)` or `inputs`, or Dataset elements of any other form.
        batch: samples of a global batch; None for batched data.
        seed: of the order of arrays, and of a PyDataset's batches.
        shuffle: whether to shuffle these; other data keep their own order.
        steps_per_epoch: steps per epoch of infinite data, or of others if an epoch is a part of a pass.
        starts_over: whether a Dataset's pass may end within an epoch.

    Raises:
        ConfigError: a missing batch, or one that is not divisible by the replicas.
        DataError: no samples, or ranks with different samples or orders.
    """
    data, change = data if isinstance(data, WeightedBatches) else (data, None)
    if isinstance(data, tf.data.Dataset):
        options = {"steps_per_epoch": steps_per_epoch, "starts_over": starts_over}
        return _dataset(data, change, backend, batch=batch, **options)
    if is_stream(data):
        return _stream(data, change, backend, batch=batch, seed=seed, shuffle=shuffle, steps_per_epoch=steps_per_epoch)
    if batch is None:
        raise ConfigError("Arrays need a batch: pass fit(…, batch=N), the samples per step over all ranks.")
    source = as_source(data)
    uneven = backend.capabilities.uneven
    per_replica(batch, backend.data_parallel.size, uneven=uneven)
    check_given(lambda: _given_arrays(source, batch), backend, "training")
    return SourceTraining(
        source,
        batch=batch,
        index=backend.process,
        size=backend.processes,
        seed=seed,
        shuffle=shuffle,
        uneven=uneven,
        steps_per_epoch=steps_per_epoch,
    )


def _given_arrays(source: ArraySource, batch: int) -> Given:
    return Given("arrays", batch, source.size, source.fingerprint().hex())


def _dataset(
    data: tf.data.Dataset,
    change: Change | None,
    backend: Backend,
    *,
    batch: int | None,
    **options: Any,
) -> DatasetTraining:
    made = batches_in(data)
    if batch is not None and made is not None and not batch_of(made)[1]:
        raise ConfigError(
            "The Dataset comes in batches already: leave out batch_size (or batch). Where its batches are to "
            "be samples, such as windows of text, make them with batch(…, drop_remainder=True)."
        )
    if batch is not None:
        per_replica(batch, backend.data_parallel.size, uneven=backend.capabilities.uneven)
    dataset = data if batch is None else data.batch(batch)
    if backend.job_size > 1:
        check_order(dataset, "training")
    caches = caches_of(dataset) if backend.job_size > 1 else []
    with refusing_shared_caches(caches, "training"):
        found, shards = first_and_shards(dataset, backend.process, backend.processes, owner=data)
    first = _checked(found, backend.processes, dataset)
    cut = _cut(dataset, batch or count_of(first), backend, change)
    sliced = DatasetTraining(dataset, cut, shards=shards, **options)
    length = length_of(dataset)
    everyone = _check_same_batches(
        "a Dataset",
        first=first,
        data=sliced,
        backend=backend,
        cure="Give shuffle() a seed",
        length=length,
        sharded=shards is not None,
        caches=caches,
        parts=parts_of(first) if backend.job_size > 1 and draws(dataset) else [],
    )
    if shards is not None and not all(given.sharded for given in everyone):
        return DatasetTraining(dataset, cut, **options)
    return sliced


def _cut(data: Any, batch: int, backend: Backend, change: Change | None) -> Cut:
    """Return what takes this replica's slice of global batches.

    Raises DataError for no samples, and ConfigError for a number of them that does not divide.
    """
    if not batch:
        raise DataError(
            f"{name_of(data)} gives a first batch without samples, on which the model would be built. Leave it "
            "out, such as by dataset.filter(lambda x, y: tf.shape(x)[0] > 0)."
        )
    size = backend.data_parallel.size
    if batch % size and not backend.capabilities.uneven:
        near = max(1, batch // size) * size
        raise ConfigError(
            f"A batch of {batch} samples does not divide among {size} ranks, the first of the training data. Make "
            f"batches of {near} or {near + size} where the data are batched, as by dataset.batch({near}) or in "
            "bucket_batch_sizes, or use another number of ranks."
        )
    return Cut(batch, index=backend.process, size=backend.processes, name=name_of(data), change=change)


def _stream(
    data: Any,
    change: Change | None,
    backend: Backend,
    *,
    batch: int | None,
    seed: int,
    shuffle: bool,
    steps_per_epoch: int | None,
) -> TrainingData:
    if batch is not None:
        raise ConfigError(f"The data come in batches already: leave out batch. Received: batch={batch}.")
    first, batches = opened(data)
    cut = _cut(data, count_of(first), backend, change)
    training: TrainingData
    if isinstance(data, keras.utils.PyDataset):
        training = PyDatasetTraining(data, cut, seed=seed, shuffle=shuffle, steps_per_epoch=steps_per_epoch)
    else:
        training = GeneratorTraining(data, cut, opened=batches, steps_per_epoch=steps_per_epoch)
    _check_same_batches(
        _kind(data), first=first, data=training, backend=backend, cure="Draw from generators with a seed"
    )
    return training


def _check_same_batches(
    kind: str,
    first: Any,
    data: TrainingData,
    backend: Backend,
    cure: str,
    length: int | None = None,
    **facts: Any,
) -> list[Given]:
    """Verify that ranks have the same first batch and number of batches. Collective.

    `length` is used if known: epochs of different lengths may have the same number of steps.
    """
    size = data.steps_per_epoch if length is None else length
    first_pass: FirstPass | None = getattr(data, "first_pass", None)
    facts["kept"] = first_pass is not None and first_pass.kept
    everyone = check_given(lambda: Given(kind, data.batch, size, content_of(first), **facts), backend, "training", cure)
    if first_pass is not None and not all(given.kept for given in everyone):
        first_pass.drop()  # all ranks go on with the same pass
    return everyone


def _kind(stream: Any) -> str:
    return "a PyDataset" if isinstance(stream, keras.utils.PyDataset) else "a generator function"


class WeightedBatches(NamedTuple):
    """Batches with a function that weights each rank's samples only."""

    data: Any
    change: Change


def with_class_weights(data: Any, class_weight: Mapping[int, float] | None) -> Any:
    """Multiply the sample weights of `data` by class weights (by label; default: 1).

    Targets are integer or one-hot labels; others raise ConfigError.
    """
    if class_weight is None:
        return data
    try:
        weights = {int(label): float(weight) for label, weight in class_weight.items()}
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            f"class_weight gives labels their weights, as {{0: 1.0, 1: 4.5}} does. Received: {class_weight!r}."
        ) from None
    negative = next((label for label in weights if label < 0), None)
    if negative is not None:
        raise ConfigError(f"class_weight counts labels from 0. Received: {negative}.")
    table = np.ones(1 + max(weights, default=0), np.float32)
    for label, weight in weights.items():
        table[label] = weight
    if isinstance(data, tf.data.Dataset) or is_stream(data):
        return WeightedBatches(data, lambda *elements: _weighted(elements, table))
    elements = as_source(data).elements
    inputs, targets, factor = _weighted(elements, table)
    return inputs, targets, factor.numpy()


def _weighted(elements: tuple[Any, ...], table: np.ndarray) -> tuple[Any, ...]:
    if len(elements) not in (2, 3):
        raise ConfigError("class_weight needs targets: the data hold inputs alone.")
    inputs, targets, *weights = elements
    if tf.nest.is_nested(targets):
        raise ConfigError("class_weight is for models with one output: give sample weights instead.")
    labels = _labels_of(tf.convert_to_tensor(targets))
    known = tf.gather(table, tf.minimum(labels, len(table) - 1))
    factor = tf.where(labels < len(table), known, tf.ones_like(known))
    return inputs, targets, factor * tf.cast(weights[0], tf.float32) if weights else factor


def _labels_of(targets: tf.Tensor) -> tf.Tensor:
    """Return labels [samples], int64, from [samples], [samples, 1] or one-hot rows.

    Labels of a binary cross-entropy may be floats.
    """
    rank = targets.shape.rank
    if rank not in (1, 2) and (rank is not None or targets.dtype.is_floating):
        raise ConfigError(f"class_weight needs labels or one-hot targets. Received: targets of {targets.shape}.")
    if rank == 2 and targets.shape[1] != 1:
        return tf.argmax(targets, -1)
    flat = tf.reshape(targets, [-1])
    labels = tf.cast(flat, tf.int64)
    if flat.dtype.is_floating and tf.executing_eagerly() and bool(tf.reduce_any(tf.cast(labels, flat.dtype) != flat)):
        raise ConfigError(
            f"class_weight needs labels or one-hot targets. Received: targets of {targets.shape} that are no whole "
            "numbers."
        )
    return labels


def validation_batches(data: Any, backend: Backend, *, batch: int, what: str = "validation") -> Iterable[Batch]:
    """Return this replica's share of validation data: arrays, an ArraySource, or global batches.

    Raises ConfigError for infinite data, and DataError for no samples, or ranks with different ones.
    """
    index, size = backend.process, backend.processes
    if is_stream(data):
        stream = StreamEvaluation(data, index=index, size=size)
        count = data.num_batches if isinstance(data, keras.utils.PyDataset) else None
        return _alike(
            _kind(data), batches=stream, first=lambda: opened(data)[0], count=count, backend=backend, what=what
        )
    if isinstance(data, tf.data.Dataset):
        if backend.job_size > 1:
            check_order(data, what)
        caches = caches_of(data) if backend.job_size > 1 else []
        with refusing_shared_caches(caches, what):
            found, shards = first_and_shards(data, index, size, owner=data)
        first = _checked(found, size, data)
        batches = evaluation_of_dataset(data, index=index, size=size, shards=shards)
        return _alike(
            "a Dataset",
            batches=batches,
            first=lambda: first,
            count=length_of(data),
            backend=backend,
            what=what,
            drawn=draws(data),
            caches=caches,
        )
    source = data if isinstance(data, ArraySource) else ArraySource(data, f"{what} data")
    check_given(lambda: _given_arrays(source, batch), backend, what)
    return SourceEvaluation(source, batch=batch, index=index, size=size)


def _alike(
    kind: str,
    batches: Iterable[Batch],
    first: Callable[[], Any],
    count: int | None,
    backend: Backend,
    what: str,
    drawn: bool = False,
    caches: Sequence[str] = (),
) -> Iterable[Batch]:
    """Return `batches` after verifying that ranks agree on them. Collective."""

    def given() -> Given:
        batch = first()
        parts = parts_of(batch) if drawn else []
        return Given(kind, count_of(batch), count, content_of(batch), parts=parts, caches=list(caches))

    check_given(given, backend, what, "Leave out shuffle()")
    return batches if count is not None or backend.job_size == 1 else AsMany(batches, backend, what)


def _checked(batch: Any, parts: int, dataset: tf.data.Dataset) -> Any:
    """Return a valid first global batch. Raises DataError if missing, of another structure, or not to be divided."""
    if batch is None:
        raise NoSamplesError("The dataset is empty.")
    if any(tensor.shape.rank == 0 for tensor in tf.nest.flatten(batch)):
        raise DataError("The dataset is not batched: pass fit(…, batch=N), the samples per step over all ranks.")
    if parts > 1:
        try:
            check_division(batch, parts)
        except DataError as error:
            if batches_in(dataset) is not None:
                raise
            raise DataError(
                f"If the elements of the dataset are samples, batch them: dataset.batch(N). {error}"
            ) from error
    return batch


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
        mine = training_data(data, SingleBackend(backend.session), batch=rows, starts_over=True, **options)
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
        mine = validation_batches(named, SingleBackend(backend.session), batch=rows, what=what)
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
