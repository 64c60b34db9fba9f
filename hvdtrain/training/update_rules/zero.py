"""ZeRO stage 1: each replica keeps and updates a slice of the optimizer's slots.

Rajbhandari et al. 2020 (arXiv:1910.02054). Each large variable is laid out flat, in row-major order, and cut into one
slice per replica. A step reduce-scatters the gradient, so that every replica has the sum of its own slice; the
optimizer updates a master copy of that slice; an all-gather gives all replicas the whole variable again. That moves as
many bytes as an all-reduce, and divides the work of the update and the memory of the slots by the number of replicas.
Small variables are all-reduced and updated whole everywhere: their messages cost the same, their slots next to nothing.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.optim.averaging import average_of, has_averages, innermost, replaced_weights
from hvdtrain.optim.clipping import square_sum
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.state.slots import slot_tensors
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.forward_backward import LocalGradients
from hvdtrain.training.update_rules.base import UpdateRule

SMALL_BYTES = 64 * 1024
"""Variables up to this size stay whole: an all-reduce of 64 KB takes as long as one of 1 KB, over MPI and Gloo."""

ELEMENTWISE = (
    keras.optimizers.SGD,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Nadam,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.RMSprop,
    keras.optimizers.Ftrl,
    keras.optimizers.Lion,
)
"""Keras' optimizers that move each element by its own gradient alone: a slice is updated as within the whole."""


class ZeroUpdate(UpdateRule):
    """Sharded slots and update; see the module and `UpdateRule`.

    Raises:
        ConfigError: an optimizer that looks at whole variables, or one that has slots for them already.
    """

    @classmethod
    def check(cls, options: StepOptions, optimizer: Any) -> None:
        """See `UpdateRule`."""
        unfit = {
            "--reduce-op=adasum": options.reduce_op == "adasum",
            "--compression": options.compression != "none",
            "--gradient-groups": options.gradient_groups > 0,
            "--predivide": options.predivide != 1.0,
            "--sparse-gradients=gather": options.sparse_gradients == "gather",
        }
        options.refuse_with("--zero", unfit)
        _check_elementwise(optimizer)

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        _refuse_slots(optimizer)
        self._shards = {id(v): Shard(v, backend) for v in model.trainable_variables if not _stays_whole(v)}
        self._targets = [self._shards[id(v)].master if id(v) in self._shards else v for v in model.trainable_variables]
        self._averages: list[tuple[Any, tf.Tensor]] = []
        super().__init__(backend, model, optimizer, options)
        sharded = {path for path, v in zip(self._paths, self._variables, strict=True) if id(v) in self._shards}
        op = (options or StepOptions()).reduce_op
        reducer = ScatterReducer(backend, sharded)
        self._reducer = WeightedReducer(backend, ReductionOptions(op), reducer)

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Reduce-scatter the gradients, update this replica's slices, and gather the whole variables."""
        gradients, totals = self._reducer.reduce(
            local.gradients,
            local.totals,
            self._paths,
            weight_at=1,
            expected=local.expected_weight,
            uniform=local.uniform,
        )
        scales = has_dynamic_scale(self.optimizer)
        norm = self._global_norm(gradients) if measure or scales or self._clipping.norm is not None else None
        if scales:
            gradients = _overflowing_together(gradients, norm)
        gradients, norm = self._clipped(gradients, norm)
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._targets)
        self._gather(gradients)
        return totals, norm

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the slots: those of sharded variables as slices of flat tensors."""
        tensors = {}
        for path, (slot, owner) in slot_tensors(self.optimizer, self._targets, self._paths).items():
            shard = None if owner is None else self._shards.get(id(self._variables[owner]))
            tensors[f"optimizer/{path}"] = (
                replicated_tensor(slot)
                if shard is None
                else NamedTensor(slot, (shard.elements,), (slice(shard.begin, shard.end),), replicated=False)
            )
        return tensors

    def follow_model(self) -> None:
        """Refuse layers that were frozen or unfrozen.

        Raises:
            ConfigError: others are to be trained than at the beginning.
        """
        before, now = {id(v) for v in self._variables}, {id(v) for v in self.model.trainable_variables}
        if before != now:
            raise ConfigError(
                "Layers were frozen or unfrozen since the slots were made, and --zero keeps slices of them: give a new "
                f"Trainer a new optimizer. Received: {len(now)} trainable variables, {len(before)} before."
            )

    def adopt_weights(self) -> None:
        """Cut the master slices out of the model's variables anew."""
        for shard in self._shards.values():
            shard.master.assign(shard.cut())

    def consolidate(self) -> None:
        """Gather the optimizer's averages of the weights, if it keeps any; the weights are whole after each step."""
        if not has_averages(self.optimizer):
            return
        inner = innermost(self.optimizer)
        averages = {path: average_of(inner, target) for path, target in zip(self._paths, self._targets, strict=True)}

        def gathered() -> dict[str, tf.Tensor]:
            return {
                path: self._whole(variable, tf.convert_to_tensor(average), f"zero_average/{path}")
                for (path, average), variable in zip(averages.items(), self._variables, strict=True)
                if average is not None
            }

        wholes = tf.function(lambda: self._backend.run(gathered), autograph=False).get_concrete_function()()
        named = dict(zip(self._paths, self._variables, strict=True))
        self._averages = [(named[path], value) for path, value in wholes.items()]

    def reported(self, totals: tf.Tensor) -> tf.Tensor:
        """See `UpdateRule`; training goes on: averages of before are let go."""
        self._averages = []
        return totals

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """See `UpdateRule`; the averages are those of the last `consolidate`."""
        with replaced_weights(self._averages):
            yield

    def _build_optimizer(self) -> None:
        inner = innermost(self.optimizer)
        self.optimizer.build(self._targets)
        for shard in self._shards.values():
            # Keras asks with the tf.Variable, whose name holds those of the layers.
            decays = inner._use_weight_decay(shard.whole.value) and inner._use_weight_decay(shard.master)
            inner._exclude_from_weight_decay_cache[inner._var_key(shard.master)] = decays
        # A saved model would hold this replica's slices for the slots of the whole: it holds none, and starts anew.
        vars(self.optimizer)["save_own_variables"] = lambda store: None

    def _global_norm(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """Return the L2 norm of the whole gradient, a float64 scalar; squares of slices add up over the replicas."""
        sharded = [g for g, v in zip(gradients, self._variables, strict=True) if id(v) in self._shards]
        whole = [g for g, v in zip(gradients, self._variables, strict=True) if id(v) not in self._shards]
        squares = self._backend.all_reduce(square_sum(sharded), name="gradient//norm")
        return tf.sqrt(squares + square_sum(whole))

    def _gather(self, gradients: Sequence[Gradient]) -> None:
        """Give every replica the whole of each variable that was updated in slices."""
        for path, variable, gradient in zip(self._paths, self._variables, gradients, strict=True):
            shard = self._shards.get(id(variable))
            if shard is not None and gradient is not None:
                variable.assign(self._whole(variable, shard.master.value.read_value(), f"zero/{path}"))

    def _whole(self, variable: Any, mine: tf.Tensor, name: str) -> tf.Tensor:
        """Return the whole of which `mine` is this replica's slice, in the shape of `variable`."""
        if id(variable) not in self._shards:
            return mine
        return tf.reshape(self._backend.all_gather(mine, name=name), variable.shape)


class Shard:
    """This replica's slice of one variable, laid out flat.

    Args:
        whole: a Keras variable.
        backend: the replicas; see `slice_length`.
    """

    def __init__(self, whole: Any, backend: Backend) -> None:
        self.whole = whole
        self.elements = int(tf.TensorShape(whole.shape).num_elements())
        length = slice_length(self.elements, backend.size)
        self.begin = min(backend.index * length, self.elements)
        self.end = min(self.begin + length, self.elements)
        self.master = keras.Variable(self.cut(), dtype=whole.dtype, trainable=True, name=whole.name)
        # Optimizers name their slots, and choose what decays, by the path and dims of the variable.
        self.master._path = whole.path
        self.master.whole = whole

    def cut(self) -> tf.Tensor:
        """Return the slice as the whole variable holds it now."""
        return tf.reshape(self.whole.value, [-1])[self.begin : self.end]


def slice_length(elements: int, replicas: int) -> int:
    """Return the elements of a slice; the last ones may have fewer, or with very many replicas none."""
    return -(-elements // replicas)


class ScatterReducer(GradientReducer):
    """Reduces the gradients of sharded variables to this replica's slice, and all-reduces the others.

    Args:
        collectives: the replicas.
        sharded: paths of the sharded variables.
    """

    def __init__(self, collectives: Any, sharded: Collection[str]) -> None:
        super().__init__(collectives, ReductionOptions("sum", sparse_gradients="dense"))
        self._sharded = sharded

    def reduce(
        self,
        gradients: Sequence[Gradient],
        paths: Sequence[str],
        *,
        role: str = "gradient",
        exact: Collection[str] = (),
    ) -> list[Gradient]:
        """Return each sharded gradient's own slice of the sum, and the whole sum of the others; None stays None."""
        kept = [i for i, path in enumerate(paths) if path not in self._sharded]
        reduced = [
            None if gradient is None or i in kept else self._scattered(gradient, f"{role}/{paths[i]}")
            for i, gradient in enumerate(gradients)
        ]
        whole = super().reduce([gradients[i] for i in kept], [paths[i] for i in kept], role=role, exact=exact)
        for i, gradient in zip(kept, whole, strict=True):
            reduced[i] = gradient
        return reduced

    def _scattered(self, gradient: Gradient, name: str) -> tf.Tensor:
        """Send each replica its slice and add up what came.

        Between 2 ranks Open MPI's own reduce-scatter of 36 MB takes 28.7 ms, its all-to-all 8.2 (`bench collectives`).
        """
        flat = tf.reshape(tf.convert_to_tensor(gradient), [-1])
        size, elements = self._exchange.size, flat.shape.num_elements()
        length = slice_length(elements, size)
        if length * size != elements:
            flat = tf.pad(flat, [[0, length * size - elements]])
        total = tf.add_n(tf.unstack(tf.reshape(self._exchange.all_to_all(flat, name=name), [size, length])))
        mine = max(0, min(length, elements - self._exchange.index * length))
        return total if mine == length else total[:mine]


def _overflowing_together(gradients: Sequence[Gradient], norm: tf.Tensor) -> list[Gradient]:
    """Spread an overflow in any replica's slice to all replicas, so that all skip the step and lower the scale."""
    places = [i for i, gradient in enumerate(gradients) if gradient is not None]
    smallest = min(places, key=lambda i: gradients[i].shape.num_elements() or 0)
    shared = list(gradients)
    poison = tf.where(tf.math.is_finite(norm), tf.zeros_like(norm), tf.constant(float("nan"), norm.dtype))
    shared[smallest] = shared[smallest] + tf.cast(poison, shared[smallest].dtype)
    return shared


def _stays_whole(variable: Any) -> bool:
    """Whether a variable is small, or has a constraint, which Keras applies to the whole of it after each update."""
    elements = int(tf.TensorShape(variable.shape).num_elements())
    return variable.constraint is not None or elements * tf.as_dtype(variable.dtype).size <= SMALL_BYTES


def _check_elementwise(optimizer: Any) -> None:
    inner = innermost(optimizer)
    name = type(inner).__name__
    if type(inner) not in ELEMENTWISE:
        known = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise ConfigError(
            f"--zero updates slices of variables, and {name} may look at whole ones: use one of {known}, or leave out "
            "--zero."
        )
    for option in ("clipnorm", "global_clipnorm"):
        if getattr(inner, option) is not None:
            raise ConfigError(f"{name}({option}=…) would see slices under --zero: use --clip-norm in its place.")


def _refuse_slots(optimizer: Any) -> None:
    if optimizer.built:
        raise ConfigError(
            f"The optimizer {innermost(optimizer).name!r} has slots for whole variables already, and --zero keeps "
            "slices of them: give a new optimizer, its name, or a function that builds one."
        )
