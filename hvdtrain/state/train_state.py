"""Training state: the object that is broadcast, hashed, checkpointed and restored."""

import zlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import GATHER_TIMEOUT_S, Backend, gather
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.compat.keras_variables import trained_variables
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, DesyncError, LaunchError
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.placement import drawn_apart, drawn_for_samples, whole_box
from hvdtrain.state.hashes import digest_of, digest_of_parts
from hvdtrain.state.layer_states import layers_with_states, restore_states, share_states, states_of
from hvdtrain.state.named_tensors import (
    NamedTensor,
    StateSpec,
    elements,
    expert_parallel,
    is_split,
    placed_tensor,
    replicated_tensor,
    spec_of,
)
from hvdtrain.state.optimizers import replicated_slots
from hvdtrain.state.scalars import Scalars, scalars_from
from hvdtrain.state.structure import seed_states, structure_of
from hvdtrain.state.variables import unwrap

CALLS_PER_STEP = 4096
"""Calls of one dropout layer per step before its random numbers would repeat those of the next step."""
MODEL = "model/"
"""Path prefix of the model's weights."""
EXTRA = "callbacks/"
"""Path prefix of weights that callbacks hold, in a checkpoint."""
LAYERS = "layers/"
"""Path prefix of what layers hold beside their variables, in a checkpoint."""
RULE = "rule/"
"""Path prefix of what an update rule holds beside the optimizer's state."""
OPTIONAL = (EXTRA, LAYERS, RULE)
"""Path prefixes of tensors that a checkpoint need not have."""
_MASK = 0xFFFFFFFF
"""32 bits of a seed generator's key and counter."""
_SPREAD = 0x9E3779B1
"""2^32 over the golden ratio: spreads small numbers over 32 bits."""

Slots = Callable[[], Mapping[str, NamedTensor]]


class TrainState:
    """Model variables, optimizer state and scalars, by structural path.

    The optimizer is built here unless `slots` are given, which return the optimizer's and the update rule's tensors by
    path; default: `optimizer.variables`, replicated.
    """

    def __init__(self, model: Any, optimizer: Any, seed: int, *, slots: Slots | None = None) -> None:
        # A built LossScaleOptimizer would recreate its scale, and a loaded one has its state already.
        if slots is None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        self.model = model
        self.optimizer = optimizer
        self.scalars = Scalars(seed=seed)
        self._slots: Slots = slots or (lambda: replicated_slots(self.optimizer, self._structure))
        self._structure = structure_of(model)
        self.held_weights: dict[str, np.ndarray] = {}
        """Weights held by callbacks, while a checkpoint is written or has been read."""
        self.generators = self._structure.by_path(seed_states(model))
        self.counter = tf.Variable(0, trainable=False, dtype=tf.int64, name="step")
        """Completed optimizer steps, readable by a compiled step with random numbers."""
        self.counts_epoch = False
        """Whether the model's metrics count an epoch that is under way."""
        self._averaging: tuple[Hashable, Callable[[], None]] | None = None
        """The compiled average of statistics, and what it was compiled for."""

    @property
    def trainable(self) -> dict[str, tf.Variable]:
        """Currently trained variables, by path, in the model's order."""
        return self._structure.by_path(self.model.trainable_variables)

    @property
    def composition(self) -> Hashable:
        """Key of the compiled step: trained layers and optimizer slots."""
        trained = tuple(bool(layer.trainable) for layer in flatten_layers(self.model))
        # The slots are recreated whenever the optimizer is extended.
        return len(trained_variables(innermost(self.optimizer))), trained, tuple(self.trainable)

    def follow_model(self) -> None:
        """Refresh the model's structure: layers may have been built or removed."""
        self._structure = structure_of(self.model)

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return every saved and broadcast tensor by structural path, with its shard."""
        weights = self._structure.by_path(self.model.weights)
        return {
            **{f"{MODEL}{path}": placed_tensor(value) for path, value in weights.items()},
            **self._slots(),
        }

    def saved_tensors(self) -> dict[str, NamedTensor]:
        """Return `named_tensors` and callbacks' weights (ConfigError if the model is sharded)."""
        if self.held_weights and is_split(self.model):
            raise ConfigError(
                "A callback holds weights (restore_best_weights=True), and each rank has slices of them, which "
                "checkpoints cannot take yet: leave it out; --keep-best keeps the best checkpoint."
            )
        held = {f"{EXTRA}{path}": replicated_tensor(tf.constant(array)) for path, array in self.held_weights.items()}
        states = {} if is_split(self.model) else states_of(layers_with_states(self.model))
        of_layers = {f"{LAYERS}{place}": replicated_tensor(tf.constant(state)) for place, state in states.items()}
        return {**self.named_tensors(), **held, **of_layers}

    def restore_layers(self, states: Mapping[str, np.ndarray]) -> None:
        """Restore what layers hold beside their variables; without `states`, let them derive it from these."""
        layers = layers_with_states(self.model)
        restore_states(layers, {**states_of(layers), **states})

    def weight_paths(self) -> list[str]:
        """Return the structural paths of the weights, in the order of `model.get_weights()`."""
        return list(self._structure.by_path(self.model.weights))

    def specs(self) -> list[StateSpec]:
        """Return the spec of every tensor, in the order of `named_tensors`."""
        return [spec_of(path, tensor) for path, tensor in self.named_tensors().items()]

    def compared_tensors(self) -> dict[str, NamedTensor]:
        """Return by path the tensors that must agree on all holders: all but statistics."""
        own = self._statistics()
        return {path: tensor for path, tensor in self.named_tensors().items() if path not in own}

    def parameters(self) -> int:
        """Return the number of scalars in the full model's weights."""
        of_a_part: int | None = getattr(self.model, "whole_parameters", None)
        if of_a_part is not None:
            return of_a_part
        return sum(elements(placed_tensor(weight).global_shape) for weight in self.model.weights)

    def broadcast(self, backend: Backend, root: int = 0) -> None:
        """Broadcast replicated tensors and scalars from `root`. Collective.

        Shards stay in place. Ranks along tp get full tensors from the first of them. Raises LaunchError if the
        replicas' models or optimizers differ.
        """
        kinds = [f"{spec.path} {spec.dtype}{list(spec.global_shape)}" for spec in self.specs()]
        mine = [zlib.crc32("".join(kinds).encode()), asdict(self.scalars) if backend.index == root else None]
        everyone = gather(backend, mine, among="replicas")
        if any(crc != everyone[0][0] for crc, _ in everyone):
            _refuse_other_tensors(kinds, backend)
        tensors = self.named_tensors().items()
        backend.broadcast({path: tensor.value for path, tensor in tensors if tensor.replicated}, root=root)
        if held := expert_parallel(self._structure.by_path(self.model.weights)):
            backend.broadcast(held, among="holders")
        if backend.axes.get("tp", 1) > 1:
            whole = {path: tensor.value for path, tensor in tensors if tensor.slice == whole_box(tensor.global_shape)}
            backend.broadcast(whole, among="tp")
        share_states(self.model, backend, root)
        self.restore(everyone[root][1])

    def average_statistics(self, backend: Backend, trainers: int | None = None) -> None:
        """Average self-updated variables (BatchNorm's statistics) over the first `trainers` replicas. Collective.

        None: over all of them.

        Those whose `aggregation` is `only_first_replica` become those of the first.

        In float64, so that a value that is equal everywhere is unchanged.
        """
        statistics = self._statistics()
        if backend.size == 1 or backend.capabilities.shares_variables or not statistics:
            return
        kind = (backend, trainers, *map(id, statistics.values()))
        if self._averaging is None or self._averaging[0] != kind:
            self._averaging = kind, self._average_of(statistics, backend, trainers)
        self._averaging[1]()

    def _average_of(
        self, statistics: Mapping[str, tf.Variable], backend: Backend, trainers: int | None
    ) -> Callable[[], None]:
        alike = [weight for weight in self.model.weights if getattr(weight, "aggregation", "") == "only_first_replica"]
        of_first = {id(unwrap(weight)) for weight in alike}

        def average_all() -> None:
            for path, variable in statistics.items():
                if id(variable) in of_first:
                    first = backend.broadcast_value(variable.read_value(), root=0, name=f"statistics/{path}")
                    variable.assign(first)
                    continue
                wide = tf.cast(variable.read_value(), tf.float64)
                name = f"statistics/{path}"
                if trainers in (None, backend.size):
                    mean = backend.all_reduce(wide, name=name, op="average")
                else:
                    counted = wide if backend.index < trainers else tf.zeros_like(wide)
                    mean = backend.all_reduce(counted, name=name) / trainers
                variable.assign(tf.cast(mean, variable.dtype))

        average: Callable[[], None] = compiled(lambda: backend.run(average_all))
        return average

    def parameter_hash(self) -> str:
        """Return the SHA-256 of path, dtype, shape and bytes of replicated weights."""
        return _digest({path: tensor.value for path, tensor in self._weights().items() if tensor.replicated})

    def agreed_hash(self, backend: Backend, *, timeout: float = GATHER_TIMEOUT_S) -> str:
        """Return the parameter hash after comparing it among replicas. Collective.

        For a split model it is that of the full model, the same in any layout. Raises DesyncError if the ranks'
        parameters differ.
        """
        mine = self.parameter_hash()
        hashes = gather(backend, mine, timeout=timeout, among="replicas")
        _refuse_others(hashes, hashes[:1] * len(hashes))
        if backend.axes.get("ep", 1) > 1:  # every rank calls it, of a stage without experts too
            _check_slices(expert_parallel(self._structure.by_path(self.model.weights)), backend, timeout)
        return digest_of_parts(self._weights(), backend, timeout=timeout) if is_split(self.model) else mine

    def seed_generators(self, replica: int, samples: int | None = None) -> None:
        """Set SeedGenerators by (seed, step, replica), inside the compiled step.

        `samples` is the index of the replica's samples, which replicas may share; None: its own.
        """
        if not self.generators:
            return
        for path, state in self.generator_states(replica, self.counter, samples).items():
            self.generators[path].assign(state)
        self.counter.assign_add(1)

    def generator_states(self, replica: int, step: Any, samples: int | None = None) -> dict[str, tf.Tensor]:
        """Return by path each SeedGenerator's state at the start of `step`.

        Arguments as for `seed_generators`.
        """
        draws = tf.cast(step, tf.int64) * CALLS_PER_STEP
        counter = tf.bitwise.bitwise_and(draws, tf.constant(_MASK, tf.int64))
        # The counter has 32 bits, exhausted after 2^20 steps: the overflow changes the key.
        overflow = tf.bitwise.right_shift(draws, tf.constant(32, tf.int64)) * _SPREAD
        overflow = tf.bitwise.bitwise_and(overflow, tf.constant(_MASK, tf.int64))
        states = {}
        # By their place in the model, of which this may be a part: Keras numbers their names over all models of the
        # process.
        everyone = getattr(self.model, "generator_paths", None) or self.generators
        places = {path: place for place, path in enumerate(everyone)}
        for path, state in self.generators.items():
            apart = drawn_apart(self.generators[path])
            slice_of = "" if apart is None else f"/{apart}"
            number = samples if samples is not None and drawn_for_samples(state) else replica
            key = zlib.crc32(f"{self.scalars.seed}/{number}/{places[path]}{slice_of}".encode())
            key = tf.bitwise.bitwise_xor(tf.constant(key, tf.int64), overflow)
            states[path] = tf.cast(tf.stack([key, counter]), state.dtype)
        return states

    def restore(self, scalars: Mapping[str, Any]) -> None:
        """Restore the scalars of a checkpoint."""
        self.scalars = scalars_from(scalars)
        self.counter.assign(self.scalars.step)

    def _weights(self) -> dict[str, NamedTensor]:
        return {path: tensor for path, tensor in self.named_tensors().items() if path.startswith(MODEL)}

    def _statistics(self) -> dict[str, tf.Variable]:
        """Return self-updated weights, such as BatchNorm's statistics, but not frozen ones."""
        moving = [weight for weight in self.model.weights if id(unwrap(weight)) in self._structure.statistics]
        return {f"{MODEL}{path}": variable for path, variable in self._structure.by_path(moving).items()}


def _digest(weights: Mapping[str, tf.Variable]) -> str:
    return digest_of({path: variable.numpy() for path, variable in weights.items()})


def _check_slices(held: Mapping[str, tf.Variable], backend: Backend, timeout: float) -> None:
    """Compare the hashes of shards along `ep` among their holders. Raises DesyncError if they differ."""
    mine, parts = _digest(held), backend.along("ep").size
    hashes = gather(backend, mine, timeout=timeout, among="replicas")
    _refuse_others(hashes, [hashes[rank % parts] for rank in range(len(hashes))])


def _refuse_others(hashes: list[str], expected: list[str]) -> None:
    """Raise for ranks with an unexpected hash. Raises DesyncError naming the first."""
    others = [rank for rank, (mine, right) in enumerate(zip(hashes, expected, strict=True)) if mine != right]
    if others:
        first = others[0]
        raise DesyncError(
            f"The parameters of rank {first} differ from those of rank {hashes.index(expected[first])} "
            f"({hashes[first][:12]} and {expected[first][:12]}; {len(others)} of {len(hashes)} ranks differ): "
            "something other than the reduced gradients changed them."
        )


def _refuse_other_tensors(mine: list[str], backend: Backend) -> None:
    """Raise if replicas have different tensors: a broadcast would deadlock."""
    everyone = gather(backend, mine, among="replicas")
    for rank, theirs in enumerate(everyone):
        strange = [f"{kind} on rank {rank} alone" for kind in theirs if kind not in everyone[0]]
        strange += [f"{kind} on rank 0 and not on rank {rank}" for kind in everyone[0] if kind not in theirs]
        if strange or theirs != everyone[0]:
            more = f" … and {len(strange) - 2} more" if len(strange) > 2 else ""
            raise LaunchError(
                "Every rank trains the same model with the same optimizers. Received: "
                f"{'; '.join(strange[:2]) or f'the same tensors in another order on rank {rank}'}{more}."
            )
