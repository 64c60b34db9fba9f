"""Training and evaluation on a user's tf.data.Dataset of global batches."""

import itertools
from collections import deque
from collections.abc import Iterator
from functools import partial

import tensorflow as tf

from hvdtrain.config.errors import ConfigError, DataError, NoSamplesError, opt
from hvdtrain.data.batch import Batch, changed
from hvdtrain.data.pipeline import PREFETCH, no_autograph, sliced, steps_of_epoch
from hvdtrain.data.streams.cut import Cut
from hvdtrain.data.streams.python_batches import FirstPass, name_of
from hvdtrain.data.streams.sharded_dataset import ShardedDataset, length_of
from hvdtrain.runtime.logs import warn_on_first


class DatasetTraining:
    """Training on a replica's slices of a user's tf.data.Dataset of global batches.

    Every rank reads the whole dataset, so its order must be the same on all of them: give `shuffle` a seed, or
    call `hvdtrain.init()` before the dataset is made. Where it is sharded, samples of other ranks are not mapped.

    Args:
        dataset: elements `(inputs, targets[, sample_weight])`, or inputs of a custom `train_step`, with a batch dim.
        cut: this replica's slice.
        steps_per_epoch: required if the dataset is infinite; counted if None.
        shards: the same dataset, sharded at its source; None where it cannot be.
        starts_over: whether a pass may end within an epoch.
    """

    endless = "leave it out, or repeat() the Dataset"
    """What to do with a finite one whose epochs are no part of a pass."""
    remedy = (
        "What helps: map() with num_parallel_calls=tf.data.AUTOTUNE and with TensorFlow's own operations, and cache() "
        "where the decoded samples fit."
    )

    def __init__(
        self,
        dataset: tf.data.Dataset,
        cut: Cut,
        *,
        steps_per_epoch: int | None = None,
        shards: ShardedDataset | None = None,
        starts_over: bool = False,
    ) -> None:
        self.batch = cut.batch
        self._size = cut.size
        self._one_shape = all(spec.shape[1:].is_fully_defined() for spec in tf.nest.flatten(dataset.element_spec))
        self._slices = _slices(dataset, cut.index, cut.size, shards)
        if cut.change is not None:
            self._slices = self._slices.map(no_autograph(partial(changed, cut.change)))
        self.first_epoch = 0
        """The training's epoch in which the dataset is begun."""
        self.first_pass: FirstPass | None = None
        """The pass that counted the batches, where one had to."""
        self.pass_steps: int | None = None if starts_over else length_of(dataset)
        if steps_per_epoch is None:
            self.steps_per_epoch = self._count(dataset, shards)
        else:
            whole = self.pass_steps
            self.steps_per_epoch = steps_per_epoch if whole is None else steps_of_epoch(steps_per_epoch, whole)
        self.varies = steps_per_epoch is None and length_of(dataset) is None
        self._may_run_out = self.varies or bool(steps_per_epoch and not starts_over and _unknown_length(dataset))

    def batches(self, start_step: int) -> Iterator[Batch]:
        start_step -= self.first_epoch * self.steps_per_epoch
        if self.first_pass is not None and self.first_pass.kept:
            yield from map(self._with_static_values, self.first_pass.take(start_step))
            # The pass that counted is the first epoch, also where training goes on behind it.
            start_step = max(0, start_step - self.steps_per_epoch)
        if self._may_run_out:
            yield from map(self._with_static_values, self._while_whole(start_step))
        else:
            yield from map(self._with_static_values, _repeated(self._slices).skip(start_step))

    def epochs(self, epoch: int, within: int) -> Iterator[Iterator[Batch]]:
        """Yield the batches of each epoch, from batch `within` of `epoch` on, each of a new pass.

        As in Keras, which counts the first epoch and the end of its pass, another has at most one batch more.
        """
        epoch -= self.first_epoch
        if epoch == 0 and self.first_pass is not None and self.first_pass.kept:
            yield map(self._with_static_values, self.first_pass.take(within))
            within, epoch = 0, 1
        # Each uses up an order of a shuffle; the pass that counted is the first epoch.
        for _ in range(epoch - (self.first_pass is not None)):
            deque(itertools.islice(self._slices, self.steps_per_epoch + 1), 0)
        while True:
            yield self._pass(within)
            within = 0

    def _pass(self, within: int) -> Iterator[Batch]:
        for step, batch in enumerate(self._slices.prefetch(PREFETCH)):
            if step > self.steps_per_epoch:
                warn_on_first(
                    f"A pass over the data has more than {step} batches: as in Keras, which counted "
                    f"{self.steps_per_epoch} in the first, the epoch ends there. Where passes grow, train in several "
                    "calls of fit with initial_epoch, or give steps_per_epoch and repeat() the dataset.",
                    stacklevel=4,
                )
                return
            if step >= within:
                yield self._with_static_values(batch)

    def _while_whole(self, start_step: int) -> Iterator[Batch]:
        """Yield the batches from `start_step` on. Raises DataError if a pass ends within an epoch."""
        for step, (place, batch) in enumerate(_repeated(self._slices.enumerate()).skip(start_step), start_step):
            if self.varies and bool(step % self.steps_per_epoch) != bool(int(place)):
                raise DataError(
                    f"Passes over the dataset have other numbers of batches than the first, {self.steps_per_epoch}: "
                    "workers with servers of parameters need passes of one length."
                )
            if step % self.steps_per_epoch and not int(place):
                raise DataError(
                    f"The dataset ran out after {step} batches, within an epoch of {self.steps_per_epoch} steps, where "
                    f"Keras would interrupt the epoch: repeat() it, or pass another {opt('steps_per_epoch')}."
                )
            yield batch

    def sample(self) -> Batch:
        """Return a representative batch, without read-ahead.

        A thread that reads ahead may begin further passes before it is stopped, and each uses up an order of a shuffle:
        the ranks would continue with different ones.
        """
        if self.first_pass is not None and self.first_pass.kept:
            return next(self.batches(0))
        return self._with_static_values(next(iter(self._slices)))

    def _count(self, dataset: tf.data.Dataset, shards: ShardedDataset | None) -> int:
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ConfigError(f"The dataset never ends: pass {opt('steps_per_epoch', 'N')}.")
        count = length_of(dataset)
        if count is None and shards is not None:
            count = shards.count()
        if count is None:
            self.first_pass = FirstPass(self._slices.prefetch(PREFETCH), name_of(dataset))
            count = self.first_pass.count
        if count == 0:
            raise NoSamplesError("The dataset is empty.")
        return count

    def _with_static_values(self, batch: Batch) -> Batch:
        """Replace tensors by Python values that hold for all full batches, if their shapes are static."""
        all_have_samples = self.batch >= self._size
        if not (self._one_shape and all_have_samples) or int(batch.global_samples) != self.batch:
            return batch
        return batch._replace(has_samples=1.0, global_samples=self.batch)


def _repeated(slices: tf.data.Dataset) -> tf.data.Dataset:
    """Repeat `slices` with read-ahead inside a pass only.

    Each pass that begins uses up an order of a shuffle. Read-ahead would begin passes that are never trained, how many
    depends on timing: a later training on the same dataset would continue with another order on each rank.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return slices.prefetch(PREFETCH).repeat().with_options(options)


def _unknown_length(dataset: tf.data.Dataset) -> bool:
    return bool(dataset.cardinality() == tf.data.UNKNOWN_CARDINALITY)


def evaluation_of_dataset(
    dataset: tf.data.Dataset, *, index: int, size: int, shards: ShardedDataset | None = None
) -> tf.data.Dataset:
    """Return this replica's slice of every batch of a user's finite dataset; see `DatasetTraining`."""
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(f"The validation dataset never ends: use take(), or pass {opt('validation_steps', 'N')}.")
    return _slices(dataset, index, size, shards).prefetch(PREFETCH)


def _slices(dataset: tf.data.Dataset, index: int, size: int, shards: ShardedDataset | None) -> tf.data.Dataset:
    return sliced(dataset, index, size) if shards is None else shards.slices(index, size)
