"""Residual networks for CIFAR-sized images (He et al. 2015, section 4.2) and ImageNet (table 1).

The small ones have 6n + 2 layers, three stages of n basic blocks; those for ImageNet have four stages of bottleneck
blocks with the stride in the 3 x 3 convolution, not the first one, as in most benchmarks ("version 1.5").
"""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.registry import classifier, dense, path_seed


def conv_norm(x: Any, channels: int, kernel: int, stride: int, seed: int, name: str, *, gamma: str = "ones") -> Any:
    """Apply a convolution and batch normalization to images [batch, height, width, channels].

    Args:
        x: the images.
        channels: output channels.
        kernel: height and width of the kernel.
        stride: stride; height and width shrink by it, rounded up.
        seed: seeds the kernel, together with `name`.
        name: prefix of the layers' names.
        gamma: initializer of the normalization's scale.
    """
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


def added(x: Any, y: Any, name: str) -> Any:
    """Return relu(x + y), both [batch, height, width, channels]."""
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, y]))


def pooled_logits(x: Any, classes: int, seed: int) -> Any:
    """Return logits [batch, classes] by global average pooling and a dense layer."""
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return dense(x, classes, seed, "logits", dtype="float32")


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
    images = keras.Input(shape, name="images")
    x = conv_norm(images, channels=width, kernel=3, stride=1, seed=seed, name="stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    for stage in range(3):
        for block in range((depth - 2) // 6):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _block(x, channels=width * 2**stage, stride=stride, seed=seed, name=f"stage{stage}_block{block}")
    return keras.Model(images, pooled_logits(x, classes, seed), name=f"resnet{depth}")


def _block(x: Any, channels: int, stride: int, seed: int, name: str) -> Any:
    y = conv_norm(x, channels=channels, kernel=3, stride=stride, seed=seed, name=f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = conv_norm(y, channels=channels, kernel=3, stride=1, seed=seed, name=f"{name}_b")
    if stride != 1 or x.shape[-1] != channels:
        x = conv_norm(x, channels=channels, kernel=1, stride=stride, seed=seed, name=f"{name}_skip")
    return added(x, y, name)


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
    images = keras.Input(shape, name="images")
    x = conv_norm(images, channels=width, kernel=7, stride=2, seed=seed, name="stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(
                x,
                channels=width * 2**stage,
                stride=stride,
                seed=seed,
                name=f"stage{stage}_block{block}",
                zero_gamma=zero_gamma,
            )
    return keras.Model(images, pooled_logits(x, classes, seed), name=f"resnet{depth}")


def _bottleneck(x: Any, channels: int, stride: int, seed: int, name: str, zero_gamma: bool) -> Any:
    y = conv_norm(x, channels=channels, kernel=1, stride=1, seed=seed, name=f"{name}_a")
    y = keras.layers.ReLU(name=f"{name}_a_relu")(y)
    y = conv_norm(y, channels=channels, kernel=3, stride=stride, seed=seed, name=f"{name}_b")
    y = keras.layers.ReLU(name=f"{name}_b_relu")(y)
    gamma = "zeros" if zero_gamma else "ones"
    y = conv_norm(y, channels=EXPANSION * channels, kernel=1, stride=1, seed=seed, name=f"{name}_c", gamma=gamma)
    if stride != 1 or x.shape[-1] != EXPANSION * channels:
        x = conv_norm(x, channels=EXPANSION * channels, kernel=1, stride=stride, seed=seed, name=f"{name}_skip")
    return added(x, y, name)


IMAGENET_FAMILY = classifier(build_imagenet, "height", "width", "channels")
