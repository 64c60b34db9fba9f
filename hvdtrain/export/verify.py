"""Checks an exported model: it runs in its own runtime, in a new process, on samples, beside the model itself."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError, ExportError
from hvdtrain.config.model import OutputKind
from hvdtrain.export.quantize import FLOAT16, FLOAT32

LIMIT_S = 900
DIFFERENCES = {FLOAT32: 1e-4, FLOAT16: 2e-2, "bfloat16": 1e-1}
"""Largest difference of outputs, as a share of the largest: what reordered sums make, and 11 or 8 bits, where a layer
computes or a file stores in these.
"""
OF_INTEGERS = 5e-2
"""Likewise of quantized weights: a value that lies between two integers is rounded to the other one."""


@dataclass(frozen=True)
class Samples:
    """Samples of which a model's outputs are known to be right or wrong."""

    inputs: Any
    """Nest of prepared inputs [samples, …]."""
    targets: np.ndarray | None = None
    """Labels [samples, …], or [samples, …, classes] where they are soft; None: nothing is known of them."""
    weights: np.ndarray | None = None
    """Weight of each label; None: 1."""

    def accuracy(self, outputs: Any, kind: OutputKind) -> float | None:
        """Return the share of right classes among `outputs`; None where they are of no classes."""
        if kind == "values" or self.targets is None or not isinstance(outputs, np.ndarray):
            return None
        predicted, labels = outputs.argmax(axis=-1), self.targets
        if kind.startswith("binary"):
            if outputs.shape[-1] != 2 or labels.size == outputs.size:  # several labels, each there or not
                predicted = outputs > 0.5
            labels = labels.reshape(predicted.shape) > 0.5
        elif labels.ndim > predicted.ndim:
            labels = labels.argmax(axis=-1) if labels.shape[-1] > 1 else labels[..., 0]
        right = (predicted == labels).astype(np.float64)
        weights = np.ones(len(right)) if self.weights is None else self.weights
        weights = np.broadcast_to(weights.reshape(weights.shape + (1,) * (right.ndim - weights.ndim)), right.shape)
        return float((right * weights).sum() / weights.sum())


def drawn_samples(inputs: Any, count: int) -> Samples:
    """Return `count` samples of small random numbers, for inputs [samples, …] of the dtypes and shapes in `inputs`."""
    draws = np.random.default_rng(0)

    def drawn(spec: Any) -> np.ndarray:
        if spec.dtype == "string":
            raise ConfigError("A model of strings is checked on samples: give export samples=x, as for predict.")
        shape = [count, *(1 if size is None else size for size in spec.shape[1:])]
        integers = np.dtype(spec.dtype).kind in "iub"
        return (draws.integers(0, 2, shape) if integers else draws.random(shape)).astype(spec.dtype)

    return Samples(tf.nest.map_structure(drawn, inputs))


@dataclass(frozen=True)
class Ran:
    """What a runtime made of samples."""

    outputs: Sequence[np.ndarray]
    ms: float
    """Median time of one sample on one thread, in milliseconds."""


def run(name: str, path: Path, inputs: Any, model: Any) -> Ran:
    """Run an exported model in a new process.

    Args:
        name: the format.
        path: the model.
        inputs: nest of arrays [samples, …].
        model: the trained model, whose layers' modules are imported where Keras loads them.

    Raises:
        ExportError: the runtime cannot load or run it.
    """
    leaves, numbers = tf.nest.flatten(inputs), range(len(tf.nest.flatten(inputs)))
    structure = json.dumps(tf.nest.pack_sequence_as(inputs, list(numbers)))
    modules = {type(layer).__module__ for layer in flatten_layers(model)}
    own = sorted(module for module in modules if module.partition(".")[0] not in ("keras", "__main__"))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TF_CPP_MIN_LOG_LEVEL": "3"}
    with TemporaryDirectory() as folder:
        given, out = Path(folder) / "samples.npz", Path(folder) / "outputs.npz"
        arrays: dict[str, Any] = {str(place): leaf for place, leaf in enumerate(leaves)}
        np.savez(given, structure=structure, **arrays)
        command = [sys.executable, "-m", "hvdtrain.export.runtimes", name, str(path), str(given), str(out), *own]
        try:
            done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ExportError(f"it did not run in {LIMIT_S} s in its own runtime") from None
        if done.returncode:
            raise ExportError(f"its runtime cannot run it: {last_line(done.stderr)}")
        with np.load(out) as found:
            outputs = [found[str(place)] for place in range(len(found.files) - 1)]
            return Ran(outputs, float(found["ms"]))


def last_line(text: str) -> str:
    """Return the last line that says something, at most 300 characters of it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = next((each for each in reversed(lines) if not each.startswith(("[", "For more"))), "")
    return line[:300]


def difference(outputs: Sequence[np.ndarray], expected: Any) -> float:
    """Return the largest difference of two models' outputs, as a share of the largest of `expected`."""
    largest = 0.0
    every = tf.nest.flatten(expected)
    if len(outputs) != len(every):
        raise ExportError(f"it returns {len(outputs)} arrays where the model returns {len(every)}")
    for mine, theirs in zip(outputs, every, strict=True):
        if mine.shape != theirs.shape:
            raise ExportError(f"it returns {list(mine.shape)} where the model returns {list(theirs.shape)}")
        if not (np.isfinite(mine).all() and np.isfinite(theirs).all()):
            return 0.0 if np.array_equal(mine, theirs, equal_nan=True) else math.inf
        scale = max(float(np.abs(theirs).max(initial=0.0)), 1e-30)
        largest = max(largest, float(np.abs(mine.astype(np.float64) - theirs).max(initial=0.0)) / scale)
    return largest
