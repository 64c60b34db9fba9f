"""Augmentation of image batches; every draw is a function of (seed, step) and of the place in the global batch.

So a sample is augmented in the same way on any number of ranks, and differently in every epoch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import suggestion

CROP_SHARE = 8
"""A crop moves an image by up to 1/8 of its size, as He et al. (2016) do on CIFAR: 4 of 32 pixels."""
MIXUP_ALPHA = 0.2
"""Zhang et al. (2018, arXiv:1710.09412) use 0.1 to 0.4 on ImageNet."""


@dataclass(frozen=True)
class Draws:
    """The random numbers of one batch, as a function of its step and the positions of its samples."""

    seed: int
    step: tf.Tensor
    """Step from the start of training, int64."""
    samples: int
    """Samples of the global batch."""
    begin: int
    """First position of this replica's slice in it."""
    end: int

    def uniform(self, purpose: int, columns: int) -> tf.Tensor:
        """Return uniform numbers [n, columns] in [0, 1) for this replica's n samples, a stream for each `purpose`."""
        key = tf.stack([tf.constant(self.seed * 8 + purpose, tf.int64), self.step])
        return tf.random.stateless_uniform([self.samples, columns], key)[self.begin : self.end]

    def beta(self, purpose: int, alpha: float) -> tf.Tensor:
        """Return numbers [n] drawn from Beta(alpha, alpha)."""
        key = tf.stack([tf.constant(self.seed * 8 + purpose, tf.int64), self.step])
        parts = tf.random.stateless_gamma([self.samples, 2], key, alpha) + 1e-30
        return (parts[:, 0] / tf.reduce_sum(parts, axis=1))[self.begin : self.end]


Augmentation = Callable[[tuple[Any, ...], Draws], tuple[Any, ...]]
"""Changes one replica's slice: (inputs [n, height, width, channels], targets[, weights]); inputs keep their dtype."""


def flip(elements: tuple[Any, ...], draws: Draws) -> tuple[Any, ...]:
    """Mirror each image left to right with probability 1/2."""
    images, *rest = elements
    mirrored = draws.uniform(0, 1)[:, :, tf.newaxis, tf.newaxis] < 0.5
    return tf.where(mirrored, tf.reverse(images, [2]), images), *rest


def crop(elements: tuple[Any, ...], draws: Draws) -> tuple[Any, ...]:
    """Shift each image by up to 1/8 of its height and width, padding with zeros."""
    images, *rest = elements
    height, width = images.shape[1:3]
    margins = [height // CROP_SHARE, width // CROP_SHARE]
    padded = tf.pad(images, [[0, 0], *([m, m] for m in margins), [0, 0]])
    moves = tf.cast(draws.uniform(1, 2) * tf.constant([2.0 * m + 1.0 for m in margins]), tf.int32)
    rows = moves[:, :1] + tf.range(height)
    columns = moves[:, 1:] + tf.range(width)
    return tf.gather(tf.gather(padded, rows, batch_dims=1), columns, axis=2, batch_dims=1), *rest


def mixup(elements: tuple[Any, ...], draws: Draws, *, classes: int) -> tuple[Any, ...]:
    """Blend each image and its label with another of the same rank; targets become soft labels [n, classes].

    Partners are the rank's slice in reverse, so the result depends on the number of ranks.
    """
    images, labels, *rest = elements
    share = draws.beta(2, MIXUP_ALPHA)
    targets = tf.one_hot(labels, classes) if labels.dtype.is_integer else tf.cast(labels, tf.float32)
    wide = share[:, tf.newaxis, tf.newaxis, tf.newaxis]
    pixels = tf.cast(images, tf.float32)
    blended = wide * pixels + (1.0 - wide) * tf.reverse(pixels, [0])
    if images.dtype.is_integer:
        blended = tf.round(blended)
    shares = share[:, tf.newaxis] * targets + (1.0 - share[:, tf.newaxis]) * tf.reverse(targets, [0])
    return tf.cast(blended, images.dtype), shares, *rest


NAMES = ("crop", "flip", "mixup")


def augmentation(names: Sequence[str], *, spec: tuple[Any, ...], classes: int | None) -> Augmentation | None:
    """Compose the augmentations `names`, in their order; None if there are none.

    Args:
        names: keys of `NAMES`.
        spec: the TensorSpecs of one sample.
        classes: number of labels.

    Raises:
        ConfigError: an unknown name, samples that are not images, or no labels to blend.
    """
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"There is no augmentation {name!r}.{suggestion(name, dict.fromkeys(NAMES, ''))}")
    if not names:
        return None
    if tf.nest.is_nested(spec[0]) or spec[0].shape.rank != 3 or not spec[0].shape.is_fully_defined():
        raise ConfigError(f"--augment is for images [height, width, channels] of one size. Received: {spec[0]}.")
    if "mixup" in names and (classes is None or tf.nest.is_nested(spec[1])):
        raise ConfigError("--augment mixup needs labels of a known number of classes.")

    changes: dict[str, Augmentation] = {"flip": flip, "crop": crop, "mixup": partial(mixup, classes=classes or 0)}

    def apply(elements: tuple[Any, ...], draws: Draws) -> tuple[Any, ...]:
        for name in names:
            elements = changes[name](elements, draws)
        return elements

    return apply
