"""The order of samples: which form a global batch is a function of (seed, epoch, step) alone."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.config.data import Tail
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.batch import slice_bounds


@dataclass(frozen=True)
class Order:
    """The order in which epochs visit samples, and its division into global batches."""

    samples: int
    """Samples of an epoch."""
    batch: int
    """Samples of a full global batch."""
    seed: int
    """Seed of the order, combined with the epoch."""
    shuffle: bool = True
    """False visits the samples in the order of their numbers."""
    tail: Tail = "pad"
    """What happens to the last samples of an epoch if they do not fill a batch."""

    def __post_init__(self) -> None:
        if self.tail == "drop" and self.samples < self.batch:
            raise ConfigError(
                f"--tail drop would leave nothing of {self.samples} samples in batches of {self.batch}: use a smaller "
                f"{opt('batch')}, or --tail pad."
            )

    @property
    def full_batches(self) -> int:
        """Full batches of an epoch."""
        return -(-self.samples // self.batch) if self.tail == "repeat" else self.samples // self.batch

    @property
    def rest(self) -> int:
        """Samples of an epoch's last, short batch; 0 if there is none."""
        return self.samples % self.batch if self.tail == "pad" else 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.full_batches + bool(self.rest)

    def numbers(self, epoch: Any, positions: Any) -> tf.Tensor:
        """Return the numbers of the samples at `positions` [...] of `epoch`, counted from 0.

        Random access: the shuffle is a bijection computed for each position alone.
        """
        positions = tf.cast(positions, tf.int64) % self.samples  # --tail repeat goes on with the epoch's first ones
        if not self.shuffle:
            return positions
        key = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(epoch, tf.int64)])
        shuffled = tf.random.experimental.index_shuffle(tf.reshape(positions, [-1]), key, self.samples - 1)
        return tf.reshape(shuffled, positions.shape)

    def slice_numbers(self, epoch: Any, first: int, steps: int, samples: int, index: int, size: int) -> tf.Tensor:
        """Return the numbers [steps, n] of a replica's samples in consecutive batches of an epoch.

        Args:
            epoch: the epoch.
            first: the first batch, counted within the epoch.
            steps: number of batches.
            samples: samples of each global batch.
            index: the replica's index among `size`.
            size: number of replicas.
        """
        begin, end, _ = slice_bounds(samples, index, size)
        positions = tf.reshape(tf.range(steps * samples, dtype=tf.int64), [steps, samples])[:, begin:end]
        return self.numbers(epoch, first * self.batch + positions)
