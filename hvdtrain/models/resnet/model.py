"""ResNet for CIFAR-sized images (He et al. 2015, section 4.2): 6n + 2 layers, three stages of n basic blocks."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.family import classifier
from hvdtrain.models.resnet.blocks import added, conv_norm, pooled_logits


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
