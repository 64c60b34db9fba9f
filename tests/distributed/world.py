"""What a distributed check is given, and the plain single-process loop that it is compared with."""

import fcntl
import hashlib
import inspect
import pickle
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.runtime.session import Session

TIMEOUT_S = 120.0
Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    session: Session
    backend: Backend
    folder: Path
    """A folder of this launch that all ranks see."""
    references: Path
    """A folder of all launches of a test run, with what one process computed."""
    timeout: float = TIMEOUT_S
    """Seconds that a rank waits for the others' bytes."""

    @property
    def rank(self) -> int:
        return self.backend.index

    @property
    def size(self) -> int:
        return self.backend.size

    @property
    def controller(self) -> str:
        return self.session.environment.controller

    def gather(self, payload: bytes) -> list[bytes]:
        return self.backend.gather_bytes(payload, timeout=self.timeout)

    def same_everywhere(self, payload: bytes) -> bool:
        return len(set(self.gather(payload))) == 1

    def reference(self, compute: Callable[..., Result], *arguments: Any) -> Result:
        """Return `compute(*arguments)`, computed by the first rank of a test run that asks for it, and kept.

        The key is the arguments, the versions of TensorFlow and Keras, and Keras' floatx, in which optimizers keep
        their rates. `compute` and arguments that are functions are found by their names and the sources of their
        files; other arguments by their `repr`.
        """
        functions = [compute, *filter(callable, arguments)]
        sources = b"".join(Path(inspect.getfile(each)).read_bytes() for each in functions)
        versions = [tf.__version__, keras.__version__, tf.keras.Model.__module__]
        words = [_named(compute), *map(_named, arguments), *versions, keras.config.floatx()]
        digest = hashlib.sha256(repr(words).encode() + sources).hexdigest()[:32]
        file = self.references / f"{digest}.pickle"
        with (self.references / f"{digest}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                result = compute(*arguments)
                part = file.with_suffix(".part")
                part.write_bytes(pickle.dumps(result))
                part.rename(file)
        return pickle.loads(file.read_bytes())


def _named(argument: Any) -> str:
    if not callable(argument):
        return repr(argument)
    assert "<" not in argument.__qualname__, f"{argument} has no name of its own"
    return f"{argument.__module__}.{argument.__qualname__}"


@contextmanager
def grappler(on: bool = True) -> Iterator[None]:
    """Run TensorFlow's graph optimizer on what is compiled in this context or in the function that this decorates.

    The battery leaves it off, since it takes a tenth of the time. Users' programs run it: where it could merge, fold or
    prune something, a check turns it on.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not on})
    try:
        yield
    finally:
        tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


@contextmanager
def computing_in(dtype: str) -> Iterator[None]:
    """Let what is built and compiled in this context, or in the function that this decorates, compute in `dtype`."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)
    try:
        yield
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])


@contextmanager
def exact_arrays() -> Iterator[None]:
    """Let arrays keep 64 bits on their way into a training; what a check builds has the types that it says."""
    policy = keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_floatx("float32")


@contextmanager
def refused(words: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Expect an error of this kind, whose message has these words, from what is called in this context."""
    with pytest.raises(kind, match=re.escape(words)):
        yield


Loss = Callable[[Any, Any], tf.Tensor]
Transform = Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]


def plain_step(
    model: Any, optimizer: Any, loss: Loss, batch: tuple[Any, Any], transform: Transform | None = None
) -> Callable[[Any, Any], None]:
    """A step on whole batches like `batch` in this process, with nothing of hvdtrain.

    `loss` returns one value for each sample. Sparse gradients are made dense, which adds up duplicate rows; `transform`
    changes them before the update. The step is compiled once for any number of samples, which halves the time of 20.
    """

    def step(inputs: Any, targets: Any) -> None:
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(loss(targets, model(inputs, training=True)))
        gradients = tape.gradient(mean, [v.value for v in model.trainable_variables])
        dense = [tf.convert_to_tensor(g) for g in gradients]
        optimizer.apply(transform(dense) if transform else dense, model.trainable_variables)

    optimizer.build(model.trainable_variables)
    specs = tf.nest.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), batch)
    return tf.function(step, input_signature=specs, autograph=False)


def plain_training(
    model: Any, optimizer: Any, loss: Loss, batches: Sequence[tuple[Any, Any]], transform: Transform | None = None
) -> list[np.ndarray]:
    """Take a `plain_step` on each of the batches, and return the weights."""
    step = plain_step(model, optimizer, loss, batches[0], transform)
    for inputs, targets in batches:
        step(inputs, targets)
    return [np.array(weight) for weight in model.get_weights()]


def relative_error(weights: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """Largest difference over all weights, as a share of the largest weight."""
    largest = max(float(np.abs(w).max()) for w in reference)
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, reference, strict=True)) / largest


def moved(weights: Sequence[np.ndarray], start: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(weights, start, strict=True))


def flat_bytes(weights: Sequence[np.ndarray]) -> bytes:
    return b"".join(np.ascontiguousarray(w).tobytes() for w in weights)
