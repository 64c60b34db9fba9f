"""Channels of a model that compute nothing: which can be taken out, and the smaller model without them."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdtrain.config.errors import ConfigError

_layers = keras.layers
PRODUCERS = (_layers.Dense, _layers.Conv1D, _layers.Conv2D, _layers.Conv3D)
"""Layers whose outputs are channels, each of which has a slice of the kernel; they are who reads channels, too."""
PASSES = (
    *(_layers.Activation, _layers.ReLU, _layers.LeakyReLU, _layers.ELU, _layers.BatchNormalization, _layers.Flatten),
    *(_layers.Dropout, _layers.SpatialDropout1D, _layers.SpatialDropout2D, _layers.SpatialDropout3D),
    *(_layers.MaxPooling1D, _layers.MaxPooling2D, _layers.MaxPooling3D),
    *(_layers.AveragePooling1D, _layers.AveragePooling2D, _layers.AveragePooling3D),
    *(_layers.GlobalMaxPooling1D, _layers.GlobalMaxPooling2D, _layers.GlobalMaxPooling3D),
    *(_layers.GlobalAveragePooling1D, _layers.GlobalAveragePooling2D, _layers.GlobalAveragePooling3D),
    *(_layers.ZeroPadding1D, _layers.ZeroPadding2D, _layers.ZeroPadding3D),
)
"""Layers that keep channels apart, and return zeros for a channel of zeros."""


@dataclass
class Chain:
    """The layers between one whose channels can be taken out and those that read them."""

    producer: Any
    norms: list[tuple[Any, int]] = field(default_factory=list)
    """Each BatchNormalization on the way, and for how many numbers of it a channel stands."""
    readers: list[tuple[Any, int]] = field(default_factory=list)
    """Each layer that reads the channels, and for how many of its inputs a channel stands."""

    @property
    def vectors(self) -> list[tuple[Any, int]]:
        """The variables that must be zero besides the kernel's slice, and for how many of their numbers it stands."""
        found = [(self.producer.bias, 1)] if self.producer.use_bias else []
        of_norms = [(each, repeats) for norm, repeats in self.norms for each in (norm.gamma, norm.beta)]
        return [*found, *((each, repeats) for each, repeats in of_norms if each is not None)]

    def alive(self) -> np.ndarray:
        """Return for each channel whether it computes anything but zeros."""
        kernel = np.asarray(self.producer.kernel)
        alive = np.any(kernel != 0, axis=tuple(range(kernel.ndim - 1)))
        if self.producer.use_bias:
            alive |= np.asarray(self.producer.bias) != 0
        for norm, repeats in self.norms:
            # It takes a channel of zeros to beta - gamma mean / deviation.
            mean = np.asarray(norm.moving_mean) * np.asarray(norm.gamma)
            moved = [mean, *([] if norm.beta is None else [np.asarray(norm.beta)])]
            for values in moved:
                alive |= np.any(values.reshape(repeats, -1) != 0, axis=0)
        return alive


def chains_of(model: keras.Model) -> dict[int, Chain]:
    """Return the chain of each layer whose channels can be taken out, by the layer's id."""
    if not getattr(model, "inputs", None) or not model.outputs:
        return {}
    graph = keras.Model(model.inputs, model.outputs)
    calls: dict[int, int] = defaultdict(int)
    readers: dict[int, list[Any]] = defaultdict(list)
    for operation in graph.operations:
        calls[id(operation)] += 1
        for tensor in keras.tree.flatten(operation.input) if calls[id(operation)] == 1 else ():
            readers[id(tensor)].append(operation)
    outputs = {id(tensor) for tensor in keras.tree.flatten(graph.outputs)}
    found = {}
    for layer in graph.operations:
        if _is_producer(layer) and not isinstance(layer.output, list):
            chain = Chain(layer)
            if _follow(layer.output, chain, readers, outputs=outputs, repeats=1):
                found[id(layer)] = chain
    return found


def _is_producer(layer: Any) -> bool:
    if type(layer) not in PRODUCERS or not layer.built:
        return False
    plain = getattr(layer, "groups", 1) == 1 and getattr(layer, "data_format", "channels_last") == "channels_last"
    return plain and _keeps_zeros(layer.activation)


def _keeps_zeros(activation: Any) -> bool:
    """Return whether a function takes zeros, and each number by itself, to zeros."""
    values = np.array([[0.0, 1.0], [0.0, -2.0]], "float32")
    outputs = np.asarray(activation(keras.ops.convert_to_tensor(values)))
    return bool(np.all(outputs[:, 0] == 0))


def _follow(tensor: Any, chain: Chain, readers: dict[int, list[Any]], *, outputs: set[int], repeats: int) -> bool:
    """Follow channels to all who read them, and return whether each can do without some."""
    if id(tensor) in outputs or not readers[id(tensor)]:
        return False
    for layer in readers[id(tensor)]:
        if type(layer) in PRODUCERS and getattr(layer, "groups", 1) == 1:
            if len(tensor.shape) != len(layer.kernel.shape) and not isinstance(layer, _layers.Dense):
                return False
            chain.readers.append((layer, repeats))
            continue
        if type(layer) not in PASSES or getattr(layer, "data_format", "channels_last") != "channels_last":
            return False
        if isinstance(layer, _layers.Activation) and not _keeps_zeros(layer.activation):
            return False
        further = repeats
        if isinstance(layer, _layers.BatchNormalization):
            if layer.axis not in (-1, len(tensor.shape) - 1) or not layer.scale:  # it moves zeros by its mean
                return False
            chain.norms.append((layer, repeats))
        elif isinstance(layer, _layers.Flatten):
            if None in tensor.shape[1:]:
                return False
            further = repeats * math.prod(tensor.shape[1:-1])
        if not _follow(layer.output, chain, readers, outputs=outputs, repeats=further):
            return False
    return True


def take_out_channels(model: keras.Model) -> keras.Model:
    """Return a copy of a model without the channels that are zero, which computes the same; it is not compiled.

    Of a layer that had only such channels one is kept.

    Args:
        model: a functional or Sequential model, pruned by `prune(pattern="channels")` and finished.

    Raises:
        ConfigError: a model of a class of its own.

    Example::

        hvdtrain.prune(model, 0.5, pattern="channels", layers="dense")
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        hvdtrain.finish_pruning(model)
        smaller = hvdtrain.take_out_channels(model)
    """
    if not isinstance(model, keras.Sequential) and not hasattr(model, "operations"):
        raise ConfigError(
            "take_out_channels takes functional and Sequential models, whose layers say who reads a channel. "
            f"Received: {type(model).__name__} {model.name!r}."
        )
    kept: dict[str, dict[str, np.ndarray]] = defaultdict(dict)
    for chain in chains_of(model).values():
        alive = chain.alive()
        alive[0] |= not alive.any()
        if alive.all():
            continue
        kept[chain.producer.name]["outputs"] = alive
        for layer, repeats in chain.norms:
            kept[layer.name]["outputs"] = np.tile(alive, repeats)
        for layer, repeats in chain.readers:
            kept[layer.name]["inputs"] = np.tile(alive, repeats)

    def smaller(layer: Any) -> Any:
        config = layer.get_config()
        if type(layer) in PRODUCERS and "outputs" in kept[layer.name]:
            config["units" if "units" in config else "filters"] = int(kept[layer.name]["outputs"].sum())
        return type(layer).from_config(config)

    compiled, model.compiled = model.compiled, False  # its optimizer is of the whole model
    try:
        copy = keras.models.clone_model(model, clone_function=smaller)
    finally:
        model.compiled = compiled
    for layer, own in zip(model.layers, copy.layers, strict=True):
        own.set_weights([*_sliced(layer, kept[layer.name])])
    return copy


def _sliced(layer: Any, kept: dict[str, np.ndarray]) -> Iterator[np.ndarray]:
    """Yield the weights of a layer without the channels that are not kept."""
    for weight in layer.weights:
        value = np.asarray(weight)
        if "inputs" in kept and weight is layer.kernel:
            value = np.compress(kept["inputs"], value, axis=-2)
        if "outputs" in kept:
            value = np.compress(kept["outputs"], value, axis=-1)
        yield value
