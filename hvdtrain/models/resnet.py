"""Residual networks for CIFAR-sized images (He et al. 2015, section 4.2) and ImageNet (table 1).

The small ones have 6n + 2 layers, three stages of n basic blocks; those for ImageNet have four stages of bottleneck
blocks with the stride in the 3 x 3 convolution, not the first one, as in most benchmarks ("version 1.5").
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.registry import classifier, dense, path_seed

Layers = Sequence[tuple[int, int, int]]
"""(channels, kernel, stride) of each convolution of a block."""


def _conv_norm(x: Any, layer: tuple[int, int, int], seed: int, name: str, *, gamma: str = "ones") -> Any:
    """Apply a convolution and batch normalization, its scale initialized by `gamma`, to images."""
    channels, kernel, stride = layer
    x = keras.layers.Conv2D(
        channels,
        kernel,
        strides=stride,
        padding="same",
        use_bias=False,
        kernel_initializer=keras.initializers.HeNormal(seed=path_seed(seed, name)),
        name=f"{name}_conv",
    )(x)
    return keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, gamma_initializer=gamma, name=f"{name}_norm")(x)


def _block(x: Any, layers: Layers, seed: int, name: str, *, gamma: str = "ones") -> Any:
    """Return relu(skip(x) + y), y the convolutions of `layers`, whose last normalization begins with `gamma`."""
    y, last = x, len(layers) - 1
    for number, layer in enumerate(layers):
        part = f"{name}_{'abc'[number]}"
        y = _conv_norm(y, layer, seed, part, gamma=gamma if number == last else "ones")
        y = y if number == last else keras.layers.ReLU(name=f"{part}_relu")(y)
    channels, stride = layers[-1][0], max(stride for _, _, stride in layers)
    if stride != 1 or x.shape[-1] != channels:
        x = _conv_norm(x, (channels, 1, stride), seed, f"{name}_skip")
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, y]))


def _network(
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    *,
    stem: tuple[int, int, int],
    pool: bool,
    blocks: Sequence[int],
    layers_of: Callable[[int, int], Layers],
    gamma: str,
    name: str,
) -> keras.Model:
    """Return a network of `blocks` blocks in each stage; `layers_of` takes the stage and the stride of a block."""
    images = keras.Input(shape, name="images")
    x = keras.layers.ReLU(name="stem_relu")(_conv_norm(images, stem, seed, "stem"))
    x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x) if pool else x
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, layers_of(stage, stride), seed, f"stage{stage}_block{block}", gamma=gamma)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(images, dense(x, classes, seed, "logits", dtype="float32"), name=name)


def build(shape: tuple[int, ...], classes: int, seed: int, *, depth: int = 20, width: int = 16) -> keras.Model:
    """Return a classifier from images `shape` [height, width, channels] to logits [classes].

    Args:
        shape: shape of one image.
        classes: number of labels.
        seed: seeds the initial value of each variable, together with its path.
        depth: 6n + 2 layers: 20, 32, 44, 56, 110 …
        width: channels of the first stage; each stage doubles them.

    Raises:
        ConfigError: a depth that is not 6n + 2.
    """
    if depth < 8 or (depth - 2) % 6:
        raise ConfigError(f"A ResNet for small images has 6n + 2 layers: 8, 14, 20, 32 … Received: depth={depth}.")
    return _network(
        shape,
        classes,
        seed,
        stem=(width, 3, 1),
        pool=False,
        blocks=[(depth - 2) // 6] * 3,
        layers_of=lambda stage, stride: [(width * 2**stage, 3, stride), (width * 2**stage, 3, 1)],
        gamma="ones",
        name=f"resnet{depth}",
    )


FAMILY = classifier(build, "height", "width", "channels")


BLOCKS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks per stage, by depth."""
EXPANSION = 4
"""Ratio of a block's output channels to those of its 3 x 3 convolution."""


def build_imagenet(
    shape: tuple[int, ...], classes: int, seed: int, *, depth: int = 50, width: int = 64, zero_gamma: bool = True
) -> keras.Model:
    """Return a classifier from images `shape`, usually [224, 224, 3], to logits [classes].

    At width 64 and with 1000 classes it has 15,995,176 trainable parameters (depth 26), 25,557,032 (50), 44,549,160
    (101) or 60,192,808 (152).

    Args:
        shape: shape of one image.
        classes: number of labels.
        seed: seeds the initial value of each variable, together with its path.
        depth: layers: 26, 50, 101 or 152.
        width: channels of the stem, and of the 3 x 3 convolutions of the first stage; each stage doubles them.
        zero_gamma: initialize the scale of each block's last normalization with zero, so that the block begins as the
            identity; helps with large batches (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

    Raises:
        ConfigError: an unknown depth, or a width that is not positive.
    """
    if depth not in BLOCKS or width < 1:
        raise ConfigError(
            "A ResNet for large images has 26, 50, 101 or 152 layers, and a positive width. "
            f"Received: depth={depth}, width={width}."
        )

    def bottleneck(stage: int, stride: int) -> Layers:
        channels = width * 2**stage
        return [(channels, 1, 1), (channels, 3, stride), (EXPANSION * channels, 1, 1)]

    return _network(
        shape,
        classes,
        seed,
        stem=(width, 7, 2),
        pool=True,
        blocks=BLOCKS[depth],
        layers_of=bottleneck,
        gamma="zeros" if zero_gamma else "ones",
        name=f"resnet{depth}",
    )


IMAGENET_FAMILY = classifier(build_imagenet, "height", "width", "channels")
