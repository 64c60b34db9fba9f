"""Augmentation: what it does to pixels and labels, and what its draws depend on."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.augment import Draws, augmentation, crop, flip, mixup
from hvdtrain.data.pipeline import ReadOptions, SourceTraining

IMAGES = np.random.default_rng(0).integers(1, 256, (64, 16, 24, 3)).astype(np.uint8)
LABELS = np.arange(64, dtype=np.int32) % 5


def draws(step=0, seed=0, samples=64, begin=0, end=64):
    return Draws(seed, tf.constant(step, tf.int64), samples, begin, end)


def test_flip_mirrors_about_every_other_image():
    images = flip((tf.constant(IMAGES), LABELS), draws())[0].numpy()
    mirrored = (images == IMAGES[:, :, ::-1]).all(axis=(1, 2, 3))
    same = (images == IMAGES).all(axis=(1, 2, 3))
    assert (mirrored ^ same).all()
    assert 16 < mirrored.sum() < 48


def test_crop_moves_within_its_margin_and_fills_with_black():
    images = crop((tf.constant(IMAGES), LABELS), draws())[0].numpy()
    padded = np.pad(IMAGES, [(0, 0), (2, 2), (3, 3), (0, 0)])
    moves = set()
    for number, image in enumerate(images):
        fits = [
            (row, column)
            for row in range(5)
            for column in range(7)
            if (padded[number, row : row + 16, column : column + 24] == image).all()
        ]
        assert len(fits) == 1
        moves.add(fits[0])
    rows, columns = ({move[axis] for move in moves} for axis in (0, 1))
    assert rows == set(range(5))
    assert columns == set(range(7))


def test_mixup_blends_pixels_and_labels_alike():
    pixels = np.zeros((64, 4, 4, 1), np.float32)
    pixels[:32] = 1.0
    labels = np.array([1] * 32 + [0] * 32, np.int32)
    images, shares = mixup((tf.constant(pixels), tf.constant(labels)), draws(), classes=2)
    np.testing.assert_allclose(images.numpy()[:, 0, 0, 0], shares.numpy()[:, 1], rtol=1e-6)
    np.testing.assert_allclose(shares.numpy().sum(axis=1), 1.0, rtol=1e-6)
    assert 0.1 < float(np.mean((shares.numpy() > 0.01) & (shares.numpy() < 0.99))) < 0.9
    whole = mixup((tf.constant(IMAGES), tf.constant(LABELS)), draws(), classes=5)[0]
    assert whole.dtype == tf.uint8


def batches(names, size, *, steps=7, start=0):
    """Return the inputs of global batches, put together from the parts of `size` replicas."""
    parts = []
    for index in range(size):
        source = ArraySource((IMAGES, LABELS))
        augment = augmentation(names, spec=source.spec, classes=5)
        data = SourceTraining(
            source, batch=24, index=index, size=size, seed=7, read_options=ReadOptions(augment=augment)
        )
        stream = data.batches(start)
        parts.append([next(stream) for _ in range(steps)])
    return [
        np.concatenate([part.inputs.numpy() for part in step if float(part.has_samples)])
        for step in zip(*parts, strict=True)
    ]


def test_any_number_of_ranks_and_a_resumed_run_change_alike():
    names = ("crop", "flip")
    alone = batches(names, 1)
    assert [len(batch) for batch in alone] == [24, 24, 16, 24, 24, 16, 24]
    for size in (2, 4):
        for one, other in zip(alone, batches(names, size), strict=True):
            assert (one == other).all()
    for one, other in zip(alone[4:], batches(names, 2, steps=3, start=4), strict=True):
        assert (one == other).all()


def test_draws_differ_by_step_seed_purpose_and_place():
    values = [draws(step, seed).uniform(purpose, 1).numpy() for step in (0, 1) for seed in (0, 1) for purpose in (0, 1)]
    assert len({value.tobytes() for value in values}) == 8
    assert len(np.unique(values[0])) == 64
    assert (draws(begin=10, end=20).uniform(0, 1).numpy() == values[0][10:20]).all()


@pytest.mark.parametrize(
    ("names", "spec", "classes", "said"),
    [
        (("crp",), (16, 24, 3), 5, "no augmentation 'crp'. Perhaps you meant: crop"),
        (("flip",), (7,), 5, "--augment is for images"),
        (("flip",), (None, 24, 3), 5, "--augment is for images"),
        (("mixup",), (16, 24, 3), None, "--augment mixup needs labels"),
    ],
)
def test_what_cannot_be_changed_is_refused(names, spec, classes, said):
    with pytest.raises(ConfigError, match=said):
        augmentation(names, spec=(tf.TensorSpec(spec), tf.TensorSpec([], tf.int32)), classes=classes)
