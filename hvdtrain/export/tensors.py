"""A model as one safetensors file: its weights by their place in it, and the config that Keras builds it from."""

import json
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from safetensors import safe_open
from safetensors.numpy import save_file

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import CheckpointError, ConfigError, ExportError
from hvdtrain.state.layer_states import layers_with_states, restore_states, states_of
from hvdtrain.state.structure import structure_of

STATES = "states/"
"""Before the places of layers that hold more than weights, such as vocabularies."""
CONFIG, QUANTIZED = "keras", "quantized"
"""Metadata of the file: the config of the model before it was quantized, and the mode of each quantized layer."""


def config_of(model: keras.Model) -> str:
    """Return the JSON from which Keras builds a model; of one that is quantized, take it before.

    Raises:
        ConfigError: Keras makes no config of it.
    """
    try:
        return json.dumps(_without_compilation(keras.saving.serialize_keras_object(model)))
    except (NotImplementedError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise ConfigError(f"--format safetensors needs the config of {type(model).__name__}: {said}") from error


def _without_compilation(config: Any) -> Any:
    """Return a config without losses and optimizers, which nobody needs to use a model."""
    if isinstance(config, list):
        return [_without_compilation(part) for part in config]
    if not isinstance(config, dict):
        return config
    return {name: _without_compilation(part) for name, part in config.items() if name != "compile_config"}


def write(model: keras.Model, path: Path, config: str, *, half: bool = False) -> None:
    """Write a model to a new file.

    Args:
        model: the model.
        path: the file.
        config: its `config_of`.
        half: whether floating-point numbers are stored in 16 bits.

    Raises:
        ExportError: the model has masks or adapters.
    """
    # Of a tensor's own memory, where it is the processor's: what Keras returns is a copy.
    arrays = {
        name: np.asarray(tf.convert_to_tensor(weight))
        for name, weight in structure_of(model).by_path(model.weights).items()
    }
    if half:
        arrays = {
            name: array.astype(np.float16) if array.dtype.kind == "f" else array for name, array in arrays.items()
        }
    training = next((name for name in arrays if name.rpartition("/")[2].startswith(("pruning_", "lora_"))), None)
    if training is not None:
        cure = "call hvdtrain.finish_pruning(model), or hvdtrain.merge_lora(model), before"
        raise ExportError(f"{training} is a part of training: {cure}.")
    arrays |= {f"{STATES}{place}": state for place, state in states_of(layers_with_states(model)).items()}
    write_arrays(arrays, path, {CONFIG: config, QUANTIZED: json.dumps(quantized_layers(model))})


def write_arrays(arrays: dict[str, np.ndarray], path: str | Path, metadata: dict[str, str]) -> None:
    """Write a safetensors file that others may read as far as the user's files may."""
    Path(path).touch()
    mode = Path(path).stat().st_mode
    save_file(arrays, path, metadata)  # makes one for its owner alone
    Path(path).chmod(mode)


def load(path: str | Path) -> Any:
    """Return the model of a safetensors file that `export` wrote.

    Classes of other packages must be imported before, and those of a script registered.

    Raises:
        CheckpointError: the file holds no model.
    """
    with safe_open(path, framework="np") as file:
        metadata = file.metadata() or {}
        if CONFIG not in metadata:
            raise CheckpointError(f"{path} holds tensors, and no model. `python -m hvdtrain export` writes models.")
        model = keras.saving.deserialize_keras_object(json.loads(metadata[CONFIG]))
        # Keras does not restore what is quantized within another layer: it is built as it was, and then quantized.
        layers = flatten_layers(model)
        for place, mode in json.loads(metadata[QUANTIZED]).items():
            layers[int(place)].quantize(mode)
        weights = structure_of(model).by_path(model.weights)
        names = set(file.keys())
        if set(weights) != {name for name in names if not name.startswith(STATES)}:
            other = sorted(set(weights) ^ names)[0]
            raise CheckpointError(f"{path} is of another version of Keras or of the model's classes: {other}.")
        for name, weight in weights.items():
            weight.assign(file.get_tensor(name).astype(weight.dtype.as_numpy_dtype))
        stored = {name.removeprefix(STATES): file.get_tensor(name) for name in names if name.startswith(STATES)}
        restore_states(layers_with_states(model), stored)
    return model


def quantized_layers(model: keras.Model) -> dict[int, str]:
    """Return the mode of each layer that is quantized, by its place among all layers."""
    return {place: mode for place, layer in enumerate(flatten_layers(model)) if (mode := quantization_of(layer))}


def is_rounded(layer: Any) -> bool:
    """Return whether `fake_quantize` lets a layer compute with a rounded kernel."""
    return bool(getattr(vars(layer).get("call"), "needs_whole_kernel", False))


def quantization_of(layer: Any) -> str | None:
    """Return how a layer is quantized; None if it is not."""
    policy = layer.dtype_policy
    return getattr(policy, "quantization_mode", None)
