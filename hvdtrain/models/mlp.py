"""Multilayer perceptron with few, large parameters, which stresses the gradient exchange."""

from typing import Any

import keras

from hvdtrain.config.errors import ConfigError
from hvdtrain.models.registry import Rules, classifier, dense


def build(shape: tuple[int, ...], classes: int, seed: int, *, depth: int = 3, width: int = 1024) -> keras.Model:
    """Return a classifier from samples of any `shape`, flattened, to logits [classes].

    Args:
        shape: shape of one sample.
        classes: number of labels.
        seed: seeds the initial value of each variable, together with its path.
        depth: number of hidden layers.
        width: units of each hidden layer.

    Raises:
        ConfigError: a depth or width that is not positive.
    """
    if depth < 1 or width < 1:
        raise ConfigError(f"mlp needs a positive depth and width. Received: depth={depth}, width={width}.")
    samples = keras.Input(shape, name="samples")
    x = keras.layers.Flatten(name="flatten")(samples)
    for number in range(depth):
        x = dense(x, width, seed, f"hidden{number}", activation="relu")
    logits = dense(x, classes, seed, "logits", dtype="float32")
    return keras.Model(samples, logits, name="mlp")


def rules(classes: int, ranks: int, *, depth: int = 3, **arguments: Any) -> Rules:
    """Return tp layouts for pairs of layers: column-parallel, then row-parallel.

    With an even number of hidden layers, the logits layer has no partner and stays full.
    """
    del classes, ranks, arguments
    first, second = (None, "tp"), ("tp", None)
    layouts = {rf"(^|/)hidden{number}/kernel$": second if number % 2 else first for number in range(depth)}
    return {**layouts, r"(^|/)logits/kernel$": second} if depth % 2 else layouts


FAMILY = classifier(build, rules=rules)
