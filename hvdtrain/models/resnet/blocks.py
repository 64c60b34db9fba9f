"""Building blocks of residual networks."""

from typing import Any

import keras

from hvdtrain.models.family import path_seed


def conv_norm(x: Any, channels: int, kernel: int, stride: int, seed: int, name: str, *, gamma: str = "ones") -> Any:
    """Apply a convolution and batch normalization to images x [batch, height, width, channels].

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
    """Add a residual branch y to x, both [batch, height, width, channels], and apply ReLU."""
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, y]))


def pooled_logits(x: Any, classes: int, seed: int) -> Any:
    """Return logits [batch, classes] of features x by global average pooling and a dense layer."""
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    initializer = keras.initializers.HeNormal(seed=path_seed(seed, "logits"))
    return keras.layers.Dense(classes, kernel_initializer=initializer, dtype="float32", name="logits")(x)
