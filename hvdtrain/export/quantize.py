"""Fewer bits for the weights of a trained model, by Keras."""

import re
import warnings
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from itertools import pairwise
from typing import Any

import keras
import numpy as np

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.export.tensors import quantization_of

FLOAT32, FLOAT16 = "float32", "float16"
CALIBRATED = ("gptq", "awq")
"""Modes of Keras that need samples, and a model of blocks that follow one another."""
OF_KERAS = ("int8", "int4", "float8", *CALIBRATED)


def quantize(model: keras.Model, mode: str, layers: str | None, samples: Any) -> str:
    """Quantize a model's weights by Keras, in place; return a sentence on what stays as it is, or "".

    Args:
        model: the model.
        mode: one of `OF_KERAS`.
        layers: an expression that is searched for in the paths of layers; None: all that Keras quantizes.
        samples: prepared inputs [samples, …], for the modes that are calibrated.

    Raises:
        ConfigError: no layer is quantized, or Keras cannot quantize this model by that mode.
    """
    pattern = re.compile(layers or "")
    inner: set[int] | None = None

    def chosen(layer: Any) -> bool:
        return pattern.search(layer.path or layer.name) is not None and (inner is None or id(layer) in inner)

    config = None
    if mode in CALIBRATED:
        blocks = Blocks(model)
        config = _calibration(mode, samples, blocks)
        inner = {id(layer) for block in blocks.found for layer in flatten_layers(block)}
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):  # Keras draws a bar on it
            warnings.simplefilter("ignore")  # of each layer that has no such mode: said below in one sentence
            model.quantize(mode, config=config, filters=chosen)
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ConfigError(
            f"--quantize {mode}: Keras cannot quantize this model: {str(error).splitlines()[0]}"
        ) from error
    done = [layer for layer in flatten_layers(model) if quantization_of(layer)]
    if not done:
        words = f"No layer's path has {layers!r}" if layers and not any(map(chosen, _with_weights(model))) else ""
        kinds = ", ".join(sorted({type(layer).__name__ for layer in _with_weights(model)}))
        why = words or f"Keras quantizes no layer of this model by it, which has {kinds}"
        raise ConfigError(
            f"--quantize {mode}: {why}. The format litert quantizes convolutions, too, by --quantize int8."
        )
    return _left(model)


def _with_weights(model: keras.Model) -> list[Any]:
    """Return the layers that have kernels or tables of their own."""
    return [
        layer
        for layer in flatten_layers(model)
        if len(flatten_layers(layer)) == 1 and any(len(weight.shape) > 1 for weight in layer.trainable_variables)
    ]


def _left(model: keras.Model) -> str:
    left = [layer for layer in _with_weights(model) if not quantization_of(layer)]
    if not left:
        return ""
    counts = Counter(type(layer).__name__ for layer in left)
    bits = sum(layer.count_params() for layer in left)
    named = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"Not quantized: {named} ({bits:,} weights stay float32)"


def _calibration(mode: str, samples: Any, blocks: "Blocks") -> Any:
    """Return Keras' configuration of a mode that needs samples: tokens [samples, length]."""
    tokens = samples if isinstance(samples, np.ndarray) else np.zeros([])
    if tokens.dtype.kind not in "iu" or tokens.ndim != 2 or not blocks.found:
        raise ConfigError(
            f"--quantize {mode} is for language models: tokens in, and blocks that follow one another. This one has "
            f"{len(blocks.found)} such blocks. int8 and int4 are for any model."
        )
    options: dict[str, Any] = {
        "dataset": list(tokens),
        "tokenizer": object(),  # of texts; samples are tokens
        "num_samples": len(tokens),
        "sequence_length": tokens.shape[1],
        "group_size": 128,  # one scale for all inputs fails with more than 128 of them (Keras 3.15)
        "quantization_layer_structure": {"pre_block_layers": [blocks.before], "sequential_blocks": blocks.found},
    }
    return (keras.quantizers.GPTQConfig if mode == "gptq" else keras.quantizers.AWQConfig)(**options)


class Blocks:
    """Parts of a functional model that follow one another: what one returns is all that the next one takes.

    Args:
        model: a model from tokens to one output.
    """

    def __init__(self, model: keras.Model) -> None:
        self.before: Any = None
        """From the tokens to the input of the first block."""
        self.found: list[keras.Model] = []
        if isinstance(model, keras.Sequential) or not hasattr(model, "operations"):
            return
        cuts = self._cuts(model)
        if len(cuts) > 1:
            self.before = keras.Model(model.inputs, cuts[0])
            self.found = [keras.Model(begin, end) for begin, end in pairwise(cuts)]

    @staticmethod
    def _cuts(model: Any) -> list[Any]:
        """Return the tensors [samples, length, width] of one shape that everything after them depends on alone."""
        inputs = {operation: keras.tree.flatten(operation.input) for operation in model.operations}
        readers = Counter(id(tensor) for operation in model.operations for tensor in inputs[operation])
        alive: dict[int, Any] = {}
        cuts: list[Any] = []
        branches = True  # the last tensor that two operations read begins a block, of which the next one is the end
        for operation in model.operations:
            for tensor in inputs[operation]:
                readers[id(tensor)] -= 1
                if not readers[id(tensor)]:
                    alive.pop(id(tensor), None)
            for tensor in keras.tree.flatten(operation.output):
                alive[id(tensor)] = tensor
            last = next(iter(alive.values()))
            alone = len(alive) == 1 and len(last.shape) == 3 and branches
            if alone and (last.shape == cuts[0].shape if cuts else readers[id(last)] > 1):
                cuts.append(last)
                branches = readers[id(last)] > 1
        return cuts
