"""What residual networks are made of."""

from typing import Any

import keras

from hvdtrain.models.family import path_seed


def conv_norm(x: Any, channels: int, kernel: int, stride: int, seed: int, name: str, *, gamma: str = "ones") -> Any:
    """Convolve images x [batch, height, width, channels] and normalize the result.

    Args:
        x: the images.
        channels: channels of the result.
        kernel: height and width of the kernel.
        stride: step of the kernel; height and width shrink by it, rounded up.
        seed: the kernel is a function of it and of `name`.
        name: what the layers' names begin with.
        gamma: initializer of the normalization's factor.
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
    """Add a residual branch y to x, both [batch, height, width, channels]."""
    return keras.layers.ReLU(name=f"{name}_relu")(keras.layers.Add(name=f"{name}_add")([x, y]))


def pooled_logits(x: Any, classes: int, seed: int) -> Any:
    """Return logits [batch, classes] of images x, from the mean over their places."""
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    initializer = keras.initializers.HeNormal(seed=path_seed(seed, "logits"))
    return keras.layers.Dense(classes, kernel_initializer=initializer, dtype="float32", name="logits")(x)
