"""Which samples form which batch: a function of (seed, epoch, step) alone."""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.config.data import Tail
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import slice_bounds


@dataclass(frozen=True)
class Order:
    """The order in which every epoch visits samples, and how it is cut into global batches."""

    samples: int
    """Samples of an epoch."""
    batch: int
    """Samples of a full global batch."""
    seed: int
    """Decides the order, together with the epoch."""
    shuffle: bool = True
    """False visits the samples in their own order."""
    tail: Tail = "pad"
    """What becomes of the last samples, where they do not fill a batch."""

    def __post_init__(self) -> None:
        if self.tail == "drop" and self.samples < self.batch:
            raise ConfigError(
                f"--tail drop would leave nothing of {self.samples} samples in batches of {self.batch}: use a smaller "
                "--batch, or --tail pad."
            )

    @property
    def full_batches(self) -> int:
        """Batches of an epoch that are full."""
        return -(-self.samples // self.batch) if self.tail == "repeat" else self.samples // self.batch

    @property
    def rest(self) -> int:
        """Samples of an epoch's last, short batch; 0 where it has none."""
        return self.samples % self.batch if self.tail == "pad" else 0

    @property
    def steps_per_epoch(self) -> int:
        """Batches of an epoch."""
        return self.full_batches + bool(self.rest)

    def numbers(self, epoch: Any, places: Any) -> tf.Tensor:
        """Return the numbers of the samples that are visited at `places` [...] of `epoch`, places counted from 0.

        Any place is reached without those before it: the shuffle is a bijection that is computed place by place.
        """
        places = tf.cast(places, tf.int64) % self.samples  # --tail repeat goes on with the epoch's first ones
        if not self.shuffle:
            return places
        key = tf.stack([tf.constant(self.seed, tf.int64), tf.cast(epoch, tf.int64)])
        shuffled = tf.random.experimental.index_shuffle(tf.reshape(places, [-1]), key, self.samples - 1)
        return tf.reshape(shuffled, places.shape)

    def part(self, epoch: Any, first: int, steps: int, samples: int, index: int, size: int) -> tf.Tensor:
        """Return the numbers [steps, n] of a replica's samples in some batches of an epoch.

        Args:
            epoch: the epoch.
            first: the first of the batches, counted within the epoch.
            steps: how many they are.
            samples: how many samples each global batch has.
            index: the replica's place among `size`.
            size: number of replicas.
        """
        begin, end, _ = slice_bounds(samples, index, size)
        places = tf.reshape(tf.range(steps * samples, dtype=tf.int64), [steps, samples])[:, begin:end]
        return self.numbers(epoch, first * self.batch + places)
