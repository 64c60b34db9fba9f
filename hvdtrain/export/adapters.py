"""Adapters (LoRA): two small matrices beside each chosen kernel are trained, and all else of a model is not."""

import re
from pathlib import Path
from typing import Any

import keras
from safetensors import safe_open

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import CheckpointError, ConfigError
from hvdtrain.export.pruning import pruned_layers, refuse_slices
from hvdtrain.export.tensors import is_rounded, quantization_of, write_arrays
from hvdtrain.state.structure import structure_of

ALPHA = "alpha"
PARTS = re.compile(r"lora_(kernel|embeddings)_[ab]$")
"""Ends of the paths of the small matrices."""


def lora(model: keras.Model, rank: int = 8, *, layers: str = "query|value", alpha: float | None = None) -> list[str]:
    """Train adapters of a model in the place of its weights, by Keras' `enable_lora`; return the layers that have one.

    What is frozen has no gradient, no slots, no exchange and no comparison by rank. Call it before `compile`.

    Args:
        model: a built model.
        rank: of the two matrices of each layer.
        layers: an expression that is searched for in the paths of layers.
        alpha: the product of the matrices counts alpha / rank; None: it counts once.

    Raises:
        ConfigError: no layer of that name, or one of them can have no adapter; a rank below 1; adapters that are there
            already, or a pruned model.

    Example::

        hvdtrain.lora(model, 8, layers="dense")
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
    """
    if rank < 1:
        raise ConfigError(f"lora takes a rank from 1. Received: {rank}.")
    able = [layer for layer in flatten_layers(model) if hasattr(layer, "enable_lora") and layer.built]
    found = [layer for layer in able if re.search(layers, layer.path)]
    if not found:
        named = ", ".join(layer.path for layer in able[:8]) or "none: is it built?"
        raise ConfigError(f"lora finds no layer whose path has {layers!r}. Layers that can have an adapter: {named}.")
    refuse_slices(found, "lora")
    if any(layer.lora_enabled for layer in found):
        raise ConfigError(
            "The model has adapters already: hvdtrain.merge_lora(model) makes them a part of its weights."
        )
    for layer in found:
        kept = getattr(layer, "kernel_constraint", None) or getattr(layer, "embeddings_constraint", None)
        states = {"is quantized": quantization_of(layer), "is rounded": is_rounded(layer), "has a constraint": kept}
        reason = next((words for words, state in states.items() if state), "")
        if reason:
            raise ConfigError(
                f"lora gives no adapter to the layer {layer.path!r}, which {reason}: leave it out by layers."
            )
    if pruned_layers(model):
        raise ConfigError("The model is pruned: call hvdtrain.finish_pruning(model) before hvdtrain.lora.")
    model.trainable = True  # a layer that is frozen as a whole would train no adapter
    for layer in flatten_layers(model):
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.trainable = False  # its statistics, too
    for weight in model.trainable_variables:
        weight.trainable = False
    for layer in found:
        layer.enable_lora(rank, lora_alpha=alpha)
    return [layer.path for layer in found]


def merge_lora(model: keras.Model) -> None:
    """Add each adapter to its layer's weights, which computes the same but for rounding, and take it off the model.

    All weights are frozen still: `weight.trainable = True` trains them again.

    Raises:
        ConfigError: the model has no adapters.

    Example::

        hvdtrain.lora(model, 4, layers="dense")
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        hvdtrain.merge_lora(model)
        model.export("saved")
    """
    for layer in _with_adapters(model):
        kind = "embeddings" if isinstance(layer, keras.layers.Embedding) else "kernel"
        base = getattr(layer, f"_{kind}")
        base.assign(getattr(layer, kind))
        getattr(layer, f"lora_{kind}_b").assign(
            keras.ops.zeros_like(getattr(layer, f"lora_{kind}_b"))
        )  # compiled calls
        for end in "ab":
            delattr(layer, f"lora_{kind}_{end}")
        layer.lora_enabled, layer.lora_rank = False, None


def save_lora(model: keras.Model, path: str | Path) -> None:
    """Write the adapters of a model, and nothing else, to a safetensors file; on one rank alone.

    Raises:
        ConfigError: the model has none.

    Example::

        hvdtrain.lora(model, 4, layers="dense")
        hvdtrain.Trainer(model, "adam", loss).fit(x, y)
        if hvdtrain.rank() == 0:
            hvdtrain.save_lora(model, "adapters.safetensors")
    """
    arrays = {name: weight.numpy() for name, weight in _adapters(model).items()}
    write_arrays(arrays, path, {ALPHA: _alpha(model)})


def load_lora(model: keras.Model, path: str | Path) -> None:
    """Give the adapters of a model, of the same layers, rank and alpha, the values in a file of `save_lora`.

    Raises:
        CheckpointError: the file is of other adapters.
        ConfigError: the model has none.

    Example::

        hvdtrain.lora(model, 4, layers="dense")
        hvdtrain.save_lora(model, "adapters.safetensors")
        hvdtrain.load_lora(model, "adapters.safetensors")
    """
    adapters = _adapters(model)
    with safe_open(path, framework="np") as file:
        alpha = (file.metadata() or {}).get(ALPHA)
        stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    other = next((n for n in {**adapters, **stored} if n not in adapters or n not in stored), None)
    other = other or next((name for name in adapters if tuple(adapters[name].shape) != stored[name].shape), None)
    if other is not None:
        raise CheckpointError(f"{path} is of other adapters than the model's: {other}.")
    if alpha != _alpha(model):
        raise CheckpointError(f"{path} is of adapters with alpha={alpha}. Those of the model have {_alpha(model)}.")
    for name, weight in adapters.items():
        weight.assign(stored[name])


def adapted_layers(model: keras.Model) -> list[Any]:
    """Return the layers that have an adapter."""
    return [layer for layer in flatten_layers(model) if getattr(layer, "lora_enabled", False)]


def _with_adapters(model: keras.Model) -> list[Any]:
    found = adapted_layers(model)
    if not found:
        raise ConfigError("The model has no adapters: hvdtrain.lora(model) gives it some.")
    return found


def _alpha(model: keras.Model) -> str:
    return str(float(_with_adapters(model)[0].lora_alpha))


def _adapters(model: keras.Model) -> dict[str, Any]:
    _with_adapters(model)
    return {name: weight for name, weight in structure_of(model).by_path(model.weights).items() if PARTS.search(name)}
