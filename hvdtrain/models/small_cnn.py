"""Small CNN without normalization or dropout: results do not depend on the number of ranks."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.registry import classifier, path_seed


def build(shape: tuple[int, ...], classes: int, seed: int, *, width: int = 32, hidden: int = 128) -> keras.Model:
    """Return a classifier from images `shape` [height, width, channels] to logits [classes].

    Args:
        shape: shape of one image.
        classes: number of labels.
        seed: seeds the initial value of each variable, together with its path.
        width: channels of the first convolution; the second has twice as many.
        hidden: units of the dense layer.

    Raises:
        ConfigError: a width that is not positive.
    """
    if width < 1 or hidden < 1:
        raise ConfigError(f"small_cnn needs a positive width and hidden. Received: width={width}, hidden={hidden}.")
    layers = keras.layers

    def options(name: str) -> dict[str, Any]:
        drawn = keras.initializers.GlorotUniform(seed=path_seed(seed, name))
        return {"kernel_initializer": drawn, "name": name}

    images = keras.Input(shape, name="images")
    x = layers.Conv2D(width, 3, padding="same", activation="relu", **options("conv1"))(images)
    x = layers.Conv2D(2 * width, 3, padding="same", activation="relu", **options("conv2"))(x)
    x = layers.MaxPooling2D(2, name="pool")(x)
    x = layers.Flatten(name="flatten")(x)
    x = layers.Dense(hidden, activation="relu", **options("hidden"))(x)
    logits = layers.Dense(classes, dtype="float32", **options("logits"))(x)
    return keras.Model(images, logits, name="small_cnn")


FAMILY = classifier(build, "height", "width", "channels")
