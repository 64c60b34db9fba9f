"""ResNet for images of ImageNet's size (He et al. 2015, table 1): four stages of bottleneck blocks.

The stride is in a block's 3 x 3 convolution and not in its first one, as most benchmarks have it ("version 1.5").
"""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.family import classifier
from hvdtrain.models.resnet.blocks import added, conv_norm, pooled_logits

BLOCKS = {26: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}
"""Blocks of each stage, by the number of layers."""
EXPANSION = 4
"""A block ends with so many times the channels of its middle."""


def build(
    shape: tuple[int, ...], classes: int, seed: int, *, depth: int = 50, width: int = 64, zero_gamma: bool = True
) -> keras.Model:
    """Return a classifier of images `shape` [height, width, channels], usually [224, 224, 3], that gives logits.

    At width 64 and with 1000 classes it has 15,995,176 trainable parameters (depth 26), 25,557,032 (50), 44,549,160
    (101) or 60,192,808 (152).

    Args:
        shape: shape of one image.
        classes: number of labels.
        seed: initial values are a function of it and of each variable's path.
        depth: layers: 26, 50, 101 or 152.
        width: channels of the stem, and of the middle of the first stage's blocks; each stage doubles them.
        zero_gamma: let every block begin as the identity, by a factor of zero in its last normalization, which
            helps with large batches (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

    Raises:
        ConfigError: another depth, or a width that is not positive.
    """
    if depth not in BLOCKS or width < 1:
        raise ConfigError(
            "A ResNet for large images has 26, 50, 101 or 152 layers, and a positive width. "
            f"Received: depth={depth}, width={width}."
        )
    images = keras.Input(shape, name="images")
    x = conv_norm(images, width, 7, 2, seed, "stem")
    x = keras.layers.ReLU(name="stem_relu")(x)
    x = keras.layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, blocks in enumerate(BLOCKS[depth]):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(x, width * 2**stage, stride, seed, f"stage{stage}_block{block}", zero_gamma)
    return keras.Model(images, pooled_logits(x, classes, seed), name=f"resnet{depth}")


def _bottleneck(x: Any, channels: int, stride: int, seed: int, name: str, zero_gamma: bool) -> Any:
    y = keras.layers.ReLU(name=f"{name}_a_relu")(conv_norm(x, channels, 1, 1, seed, f"{name}_a"))
    y = keras.layers.ReLU(name=f"{name}_b_relu")(conv_norm(y, channels, 3, stride, seed, f"{name}_b"))
    gamma = "zeros" if zero_gamma else "ones"
    y = conv_norm(y, EXPANSION * channels, 1, 1, seed, f"{name}_c", gamma=gamma)
    if stride != 1 or x.shape[-1] != EXPANSION * channels:
        x = conv_norm(x, EXPANSION * channels, 1, stride, seed, f"{name}_skip")
    return added(x, y, name)


FAMILY = classifier(build, "height", "width", "channels")
