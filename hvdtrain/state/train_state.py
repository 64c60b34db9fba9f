"""The training state: the one object that is broadcast, hashed, checkpointed and restored."""

import hashlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from hvdtrain.backends.compiled import run_once
from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import LaunchError
from hvdtrain.data.identity import Identity
from hvdtrain.state.variables import by_path, path_of, unwrap

CALLS_PER_STEP = 4096
"""Draws that one dropout layer may make in a step before its numbers would meet those of the next."""


class NamedTensor(NamedTuple):
    """A tensor of the state, and which part of the whole it is."""

    value: tf.Variable
    global_shape: tuple[int, ...]
    part: tuple[slice, ...]
    """The slice of the whole that this replica holds."""
    replicated: bool
    """Whether every replica along dp holds the same values."""


@dataclass
class Scalars:
    """The part of the state that lives on the host."""

    step: int = 0
    """Finished optimizer steps."""
    epoch: int = 0
    """Epoch of the next step."""
    seed: int = 0
    loss_scale: float = 1.0
    data: Identity | None = None
    """What tells the samples from others; None where nobody said, as in checkpoints of earlier versions."""
    processes: int | None = None
    """How many of them share the files of an epoch (--shard-by files); None where that does not matter."""
    left_out: dict[str, str] = field(default_factory=dict)
    """What is wrong with the samples of training that are left out (--on-bad-record), by number."""


def replicated(variables: Mapping[str, tf.Variable]) -> dict[str, NamedTensor]:
    """Return variables that every replica holds whole, by path, with their place in the whole."""
    return {
        path: NamedTensor(value, tuple(value.shape), tuple(slice(0, n) for n in value.shape), replicated=True)
        for path, value in variables.items()
    }


def slot_tensors(
    optimizer: Any, variables: Sequence[Any], paths: Sequence[str]
) -> dict[str, tuple[tf.Variable, int | None]]:
    """Interim."""
    found: dict[str, tuple[tf.Variable, int | None]] = {}
    marks = [path.replace("/", "_") for path in paths]
    for path, slot in by_path(optimizer.variables).items():
        owners = [i for i, mark in enumerate(marks) if f"/{mark}_" in path and slot.shape == variables[i].shape]
        found[path] = (slot, max(owners, key=lambda i: len(marks[i])) if owners else None)
    return found


class TrainState:
    """Model variables, optimizer slots and scalars, by path and never by order of creation."""

    def __init__(
        self, model: Any, optimizer: Any, seed: int, *, slots: Callable[[], Mapping[str, NamedTensor]] | None = None
    ) -> None:
        # Keras' LossScaleOptimizer would make its scale anew, and a loaded one has its state already.
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model = model
        self.optimizer = optimizer
        self.scalars = Scalars(seed=seed)
        self.trainable = by_path(model.trainable_variables)
        self._weights = by_path(model.weights, "model/")
        self._slots = slots or (lambda: replicated(by_path(optimizer.variables, "optimizer/")))
        self._statistics = {
            path: variable
            for path, variable in by_path(model.non_trainable_variables, "model/").items()
            if variable.dtype.is_floating
        }
        self.generators = by_path(seed_states(model))
        self.counter = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
        """Finished optimizer steps, where a compiled step with random draws can read them."""

    def variables(self) -> dict[str, tf.Variable]:
        """Return every variable that is saved and broadcast, by path."""
        return {path: tensor.value for path, tensor in self.named_tensors().items()}

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return every tensor of the state with its place in the whole."""
        return {**replicated(self._weights), **self._slots()}

    def changing(self) -> dict[str, tf.Variable]:
        """Return the variables, by path, that the model changes in its forward pass."""
        return {**self._statistics, **self.generators}

    def parameters(self) -> int:
        """Number of scalars among the model's weights."""
        return sum(int(np.prod(value.shape)) for value in self._weights.values())

    def average_statistics(self, backend: Backend) -> None:
        """Average the non-trainable floats (BatchNorm's moving statistics) over the replicas.

        In float64, so that a value that is the same everywhere comes back unchanged.
        """
        if backend.size == 1 or not self._statistics:
            return

        def average_all() -> None:
            for path, variable in self._statistics.items():
                wide = tf.cast(variable.read_value(), tf.float64)
                mean = backend.all_reduce(wide, name=f"statistics/{path}", op="average")
                variable.assign(tf.cast(mean, variable.dtype))

        run_once(lambda: backend.run(average_all))

    def parameter_hash(self) -> str:
        """Return the SHA-256 over path, dtype, shape and bytes of `model.weights`, in the order of paths."""
        digest = hashlib.sha256()
        for path, variable in sorted(self._weights.items()):
            value = np.ascontiguousarray(variable.numpy())
            digest.update(f"{path}:{value.dtype}:{value.shape}".encode())
            digest.update(value.tobytes())
        return digest.hexdigest()

    def agreed_hash(self, backend: Backend, *, timeout: float = 600.0) -> str:
        """Return the parameter hash after comparing it with every rank's.

        Raises:
            LaunchError: the ranks' parameters differ.
        """
        mine = self.parameter_hash()
        hashes = [text.decode() for text in backend.gather_bytes(mine.encode(), timeout=timeout)]
        others = [rank for rank, other in enumerate(hashes) if other != hashes[0]]
        if others:
            raise LaunchError(
                f"The parameters of rank {others[0]} differ from those of rank 0 "
                f"({hashes[others[0]][:12]} and {hashes[0][:12]}; {len(others)} of {len(hashes)} ranks differ): "
                "something other than the reduced gradients changed them."
            )
        return mine

    def seed_generators(self, replica: int) -> None:
        """Set the model's random generators as a function of (seed, step, replica), within the compiled step."""
        if not self.generators:
            return
        for path, state in self.generator_states(replica, self.counter).items():
            self.generators[path].assign(state)
        self.counter.assign_add(1)

    def generator_states(self, replica: int, step: Any) -> dict[str, tf.Tensor]:
        """Return what each of the model's random generators begins `step` with, by path."""
        states = {}
        # By their place in the model: Keras numbers their names over all models of the process.
        for place, (path, state) in enumerate(self.generators.items()):
            key = zlib.crc32(f"{self.scalars.seed}/{replica}/{place}".encode())
            counter = tf.cast(step * CALLS_PER_STEP, state.dtype)
            states[path] = tf.stack([tf.constant(key, state.dtype), counter])
        return states

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Take over the scalars of a checkpoint."""
        self.scalars = Scalars(**scalars)
        self.counter.assign(self.scalars.step)


def seed_states(model: Any) -> list[Any]:
    """Return the state variables of the model's seed generators (they are in `variables`, not in `weights`)."""
    weights = {id(unwrap(weight)) for weight in model.weights}
    extra = [variable for variable in model.variables if id(unwrap(variable)) not in weights]
    return [v for v in extra if path_of(v).endswith("seed_generator_state") and tuple(v.shape) == (2,)]
