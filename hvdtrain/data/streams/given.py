"""Check that `fit` and `evaluate` were given the same data on every rank."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.tensorflow import MAPS, cache_file, inputs_of, is_kind, order_depends_on_timing
from hvdtrain.config.errors import DataError, NoSamplesError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.batch import Batch, tensors_in
from hvdtrain.data.streams.sharded_dataset import is_pure

WHOLE = "Every rank is given all of them, and the trainer takes the rank's part of each batch"
OWN = 'If each rank is to train on its own part, pass shard="rank".'
_CURE = f"{WHOLE}: leave out slices such as x[rank::size] or shard(). {OWN}"
T = TypeVar("T")


@dataclass(frozen=True)
class Given:
    """Facts about one rank's data that must be the same on all ranks."""

    kind: str
    """arrays, a Dataset, a PyDataset or a generator function."""
    batch: int
    """Samples of a global batch."""
    size: int | None
    """Samples of arrays, batches of anything else; None if unknown before they are read."""
    content: str
    """A hash of arrays, or of the first batch of anything else."""
    parts: list[str] = field(default_factory=list, compare=False)
    """Hashes of the parts of a batch that differ by sample, where a map draws the rest; empty where none does."""
    sharded: bool = field(default=False, compare=False)
    """Whether this rank can read a part of the samples only."""
    kept: bool = field(default=False, compare=False)
    """Whether this rank keeps the batches of a first pass."""
    caches: list[str] = field(default_factory=list, compare=False)
    """Files to which this rank will write."""


def check_given(given: Callable[[], Given], backend: Backend, what: str, cure: str = "") -> list[Given]:
    """Refuse data that differ by rank; return the facts of all ranks. Collective.

    Args:
        given: returns the facts of this rank; not called with a single process.
        backend: the replicas.
        what: training, validation or prediction, for messages.
        cure: advice that makes a Dataset or stream yield its batches in the same order.

    Raises:
        DataError: the same on every rank; names one that differs, and in what.
    """
    if backend.job_size == 1:
        return []
    everyone = [Given(**theirs) for theirs in gather(backend, asdict(given()), timeout=None)]
    first, *others = everyone
    for rank, other in enumerate(others, start=1):
        if other != first and not _drawn_alike(first, other):
            raise DataError(_difference(first, other=other, rank=rank, what=what, cure=cure))
        for file in first.caches:
            if file in other.caches:
                raise _shared_cache(file, what)
    return everyone


def same_arrays(data: Any, backend: Backend) -> bool:
    """Return whether every rank was given the same arrays. Collective."""
    try:
        mine = ArraySource(data).fingerprint() if not isinstance(data, ArraySource) else data.fingerprint()
    except NoSamplesError:
        mine = b""
    return len(set(gather(backend, mine.hex(), timeout=None))) == 1 and mine != b""


def content_of(batch: Any) -> str:
    """Return a hash of the tensors of a batch."""
    digest = hashlib.sha256()
    for tensor in tf.nest.flatten(tensors_in(batch), expand_composites=True):
        digest.update(tf.io.serialize_tensor(tensor).numpy())
    return digest.hexdigest()


def parts_of(batch: Any) -> list[str]:
    """Return a hash for each tensor of a batch whose first sample is not as all others are; "" for the rest."""
    tensors = tf.nest.flatten(tensors_in(batch), expand_composites=True)
    return [content_of(each) if bool(tf.reduce_any(each[1:] != each[:1])) else "" for each in tensors]


def check_order(dataset: tf.data.Dataset, what: str) -> None:
    """Refuse a dataset whose order depends on timing, where every rank reads all of it.

    Raises:
        DataError: the dataset, or one that it is made of, was made with `deterministic=False`.
    """
    if dataset.options().deterministic is False or any(map(order_depends_on_timing, _made_of(dataset))):
        raise DataError(
            f"The order of the {what} data depends on timing (deterministic=False), so ranks would read different "
            "ones, and samples would be lost and repeated. Leave out deterministic=False, or let each rank read its "
            'own part: dataset.shard(hvdtrain.size(), hvdtrain.rank()) before the batches, and shard="rank".'
        )


def caches_of(dataset: tf.data.Dataset) -> list[str]:
    """Return the files to which a dataset will write its caches; one that is there already is only read."""
    files = {os.path.abspath(file) for each in _made_of(dataset) if (file := cache_file(each))}
    return sorted(file for file in files if not os.path.exists(f"{file}.index"))


@contextmanager
def refusing_shared_caches(files: Sequence[str], what: str) -> Iterator[None]:
    """Name a cache that another rank writes, too, where its lock ends a read inside the context (DataError)."""
    try:
        yield
    except tf.errors.AlreadyExistsError as error:
        if not files:
            raise
        raise _shared_cache(files[0], what) from error


def _shared_cache(file: str, what: str) -> DataError:
    return DataError(
        f"Several ranks would write the cache of the {what} data to one file, {file!r}. Give each a file of its own: "
        'dataset.cache(f"{file}-{hvdtrain.rank()}").'
    )


def draws(dataset: tf.data.Dataset) -> bool:
    """Return whether a map of a dataset depends on more than its element, as an augmentation does.

    Calls of a parallel map draw in an order that depends on timing.
    """
    return any(is_kind(each, MAPS) and not is_pure(each) for each in _made_of(dataset))


def _made_of(dataset: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    yield dataset
    for each in inputs_of(dataset):
        yield from _made_of(each)


def _drawn_alike(first: Given, other: Given) -> bool:
    """Return whether the samples are the same but for what a map draws."""
    alike = replace(other, content=first.content) == first
    return alike and any(one == two != "" for one, two in zip(first.parts, other.parts, strict=False))


class AsMany:
    """Batches of unknown number, which must be the same on every rank: compared after the last one.

    A rank with more batches than others would evaluate them alone.

    Raises:
        DataError: naming a rank that has more or fewer.
    """

    def __init__(self, batches: Iterable[Batch], backend: Backend, what: str) -> None:
        self._batches = batches
        self._backend = backend
        self._what = what

    def __iter__(self) -> Iterator[Batch]:
        count = 0
        for batch in self._batches:
            count += 1
            yield batch
        self._compare(count)

    def in_step(self) -> Iterator[Batch]:
        """Return the batches one by one, each only once it is known that every rank has it."""
        count, batches = 0, iter(self._batches)
        while (batch := next(batches, None)) is not None:
            count += 1
            # A rank that has ended says once more how many it had.
            self._compare(count, ended=False)
            yield batch
        self._compare(count, ended=False)

    def _compare(self, count: int, *, ended: bool = True) -> None:
        counts = gather(self._backend, count, timeout=None)
        for rank, other in enumerate(counts):
            if other != counts[0]:
                if ended:
                    raise DataError(_sizes(self._what, unit="batches", first=counts[0], other=other, rank=rank))
                fewest = min(counts)
                raise DataError(
                    f"The {self._what} data have {fewest} batches on rank {counts.index(fewest)} and more on rank "
                    f"{counts.index(max(counts))}. {_CURE}"
                )


def batched(batches: Iterable[T], length: int) -> Iterator[list[T]]:
    """Yield the next `length` batches, until there are no more."""
    left = iter(batches)
    while several := list(islice(left, length)):
        yield several


def in_step(batches: Iterable[Batch]) -> Iterable[Batch]:
    """Return `batches` for a use in which the ranks exchange something for each of them."""
    return batches.in_step() if isinstance(batches, AsMany) else batches


def _difference(first: Given, other: Given, rank: int, what: str, cure: str) -> str:
    if other.kind != first.kind:
        return f"The {what} data of rank {rank} are {other.kind}, and those of rank 0 {first.kind}. {WHOLE}."
    if other.batch != first.batch:
        return f"The {what} batches of rank {rank} hold {other.batch} samples, and those of rank 0 {first.batch}."
    arrays = first.kind == "arrays"
    if other.size != first.size:
        return _sizes(what, unit="samples" if arrays else "batches", first=first.size, other=other.size, rank=rank)
    if arrays:
        return (
            f"The {what} samples of rank {rank} are not those of rank 0. {WHOLE}: a slice for each rank, such as "
            f"x[rank::size], would lose the rest. {OWN}"
        )
    drawn = (
        " A map draws random numbers, which each rank may do by itself: where it leaves no part of a batch as it is, "
        "add one that shows which samples it holds, such as their numbers, or draw in layers of the model."
    )
    return (
        f"Rank {rank} reads the {what} data in another order than rank 0, so samples would be lost and repeated. "
        f"{cure}, or call hvdtrain.init() before they are made, and leave out shard(). {OWN}"
        f"{drawn * bool(first.parts)}"
    )


def _sizes(what: str, unit: str, first: int | None, other: int | None, rank: int) -> str:
    return f"The {what} data have {other} {unit} on rank {rank} and {first} on rank 0. {_CURE}"
