"""Channels of a model that compute nothing: which can be taken out, and the smaller model without them."""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from hvdtrain.compat.keras import nodes_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.state.layer_states import copy_states

_layers = keras.layers
PRODUCERS = (_layers.Dense, _layers.Conv1D, _layers.Conv2D, _layers.Conv3D)
"""Layers whose outputs are channels, each of which has a slice of the kernel; they are who reads channels, too."""
ELEMENTWISE = (_layers.Activation, _layers.ReLU, _layers.LeakyReLU, _layers.ELU)
PASSES = (
    *(*ELEMENTWISE, _layers.BatchNormalization, _layers.Flatten),
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
    nodes = nodes_of(keras.Model(model.inputs, model.outputs)) or []
    graph = _Graph(
        calls=defaultdict(list),
        readers=defaultdict(list),
        outputs={id(tensor) for tensor in keras.tree.flatten(model.outputs)},
    )
    for node in nodes:
        graph.calls[id(node.operation)].append(node)
        for tensor in node.input_tensors:
            graph.readers[id(tensor)].append(node.operation)
    found = {}
    for layer in (node.operation for node in nodes):
        if _is_plain(layer) and layer.built and _keeps_zeros(layer.activation):
            chain = Chain(layer)
            if graph.follow(layer, chain, repeats=1) and all(vector.trainable for vector, _ in chain.vectors):
                found[id(layer)] = chain
    return found


def _is_plain(layer: Any) -> bool:
    """Return whether a layer has a slice of its kernel for each channel in and out, the last dims."""
    alike = getattr(layer, "groups", 1) == 1 and getattr(layer, "data_format", "channels_last") == "channels_last"
    return type(layer) in PRODUCERS and alike


def _keeps_zeros(function: Any) -> bool:
    """Return whether a function takes each number by itself, and zero to zero."""
    values = np.array([[0.0, 1.0, -2.0], [0.0, -0.5, 3.0]], "float32")
    outputs = np.asarray(function(keras.ops.convert_to_tensor(values)))
    alone = [np.asarray(function(keras.ops.convert_to_tensor(values[:, [place]]))) for place in range(3)]
    return bool(np.all(outputs[:, 0] == 0) and np.allclose(outputs, np.concatenate(alone, axis=1), rtol=1e-5))


@dataclass
class _Graph:
    """The calls of a model's layers."""

    calls: dict[int, list[Any]]
    """Keras' node of each call of a layer, by the layer's id."""
    readers: dict[int, list[Any]]
    """Those that read a tensor, by its id."""
    outputs: set[int]
    """Ids of the model's outputs."""

    def follow(self, layer: Any, chain: Chain, *, repeats: int) -> bool:
        """Follow the outputs of a layer to all who read them, and return whether each can do without some.

        A layer that is called twice has other channels in its other call.
        """
        tensor = self.calls[id(layer)][0].outputs[0]
        readers = self.readers[id(tensor)]
        if len(self.calls[id(layer)]) != 1 or id(tensor) in self.outputs or not readers:
            return False
        for reader in readers:
            if len(self.calls[id(reader)]) != 1:
                return False
            if _is_plain(reader):
                if len(tensor.shape) != len(reader.kernel.shape) and not isinstance(reader, _layers.Dense):
                    return False
                chain.readers.append((reader, repeats))
                continue
            further = self._passes(reader, chain, tensor, repeats)
            if not further or not self.follow(reader, chain, repeats=further):
                return False
        return True

    @staticmethod
    def _passes(layer: Any, chain: Chain, tensor: Any, repeats: int) -> int:
        """Return for how many outputs of a layer a channel stands; 0 if it does not keep channels apart, or zeros."""
        if type(layer) not in PASSES or getattr(layer, "data_format", "channels_last") != "channels_last":
            return 0
        if isinstance(layer, ELEMENTWISE) and not _keeps_zeros(layer):
            return 0
        if isinstance(layer, _layers.BatchNormalization):
            if layer.axis not in (-1, len(tensor.shape) - 1) or not layer.scale:  # it moves zeros by its mean
                return 0
            chain.norms.append((layer, repeats))
        if not isinstance(layer, _layers.Flatten):
            return repeats
        return 0 if None in tensor.shape[1:] else repeats * math.prod(tensor.shape[1:-1])


def take_out_channels(model: keras.Model) -> keras.Model:
    """Return a copy of a model without the channels that are zero, which computes the same; it is not compiled.

    Of a layer that had only such channels one is kept.

    Args:
        model: a functional or Sequential model, pruned by `prune(pattern="channels")` and finished.

    Raises:
        ConfigError: a model of a class of its own, or one that Keras cannot copy.

    Example::

        model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(8)])
        hvdtrain.prune(model, 0.5, pattern="channels")
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
    except (ValueError, TypeError, NotImplementedError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"Channels are taken out of a copy of a model, which Keras cannot make: {said}") from error
    finally:
        model.compiled = compiled
    for layer in (each for each in model.layers if each.weights):
        copy.get_layer(layer.name).set_weights([*_sliced(layer, kept[layer.name])])
    copy_states(model, copy)
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
