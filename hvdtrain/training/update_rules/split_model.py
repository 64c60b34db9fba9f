"""Reductions and norms of a split model, and replicated gradients.

Ranks along tp hold norms, most biases and position embeddings in full, and each computes their gradients independently.
These are equal up to rounding, which differs: TensorFlow sums three tensors or more in the order in which buffers can
be reused (`AddN`), hence by timing, and on a GPU in thread order. Weights would diverge.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import REPLICA_AXES
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.optim.clipping import ordered_sum, square_sum, sum_of_squares
from hvdtrain.runtime.placement import Placement, placement_of
from hvdtrain.training.step.guard import VERDICT_PARTS

AXIS = "tp"
ROUNDING = {"float16": 5e-2, "bfloat16": 5e-2}
"""By the layers' compute dtype, bound on gradient deviations from rounding, relative to the norm: far above the effect
of another summation order, and below that of other random numbers. `FLOAT32` for all others.
"""
FLOAT32 = 1e-3


class ReplicatedGradients:
    """Averages gradients of weights replicated along tp; measures deviations."""

    def __init__(self, backend: Backend, placements: Sequence[Placement | None]) -> None:
        several = backend.axes.get(AXIS, 1) > 1
        self._places = [i for i, placement in enumerate(placements) if several and _is_alike(placement)]
        self._backend = backend
        self._deviations = (
            tf.Variable(tf.zeros([len(self._places)], tf.float64), trainable=False) if self._places else None
        )
        self._largest = tf.Variable(0.0, trainable=False, dtype=tf.float64) if self._places else None
        """Largest gradient norm measured so far: later gradients approach zero, but rounding errors do not."""

    def agreed(self, gradients: Sequence[Gradient], paths: Sequence[str], *, measure: bool) -> list[Gradient]:
        """Return gradients that are identical along tp for the same weights. Collective.

        Gradients are already reduced over the replicas, full or sharded. Sparse ones have the same rows on all ranks
        along tp, which have the same samples. `measure` records the deviations for `diverging_gradients`.
        """
        agreed = list(gradients)
        here = [place for place in self._places if gradients[place] is not None]
        if not here:
            return agreed
        mine = [_values(gradients[place]) for place in here]
        reducer = GradientReducer(self._backend.along(AXIS), ReductionOptions("average"))
        means = reducer.reduce(mine, [paths[place] for place in here], role="gradient_alike")
        for place, mean in zip(here, means, strict=True):
            agreed[place] = _with_values(gradients[place], mean)
        if measure:
            self._measure(here, mine, means)
        return agreed

    def among(self, paths: Sequence[str]) -> frozenset[str]:
        """Return the paths of variables that are full along tp."""
        return frozenset(paths[place] for place in self._places)

    def _measure(self, here: Sequence[int], mine: Sequence[tf.Tensor], means: Sequence[tf.Tensor]) -> None:
        assert self._deviations is not None, "there are places"
        assert self._largest is not None, "there are places"
        of_all = tf.sqrt(ordered_sum([sum_of_squares(mean) for mean in means]))
        # Not one that overflowed, which a loss scale may let happen.
        finite = tf.where(tf.math.is_finite(of_all), of_all, tf.zeros_like(of_all))
        largest = self._largest.assign(tf.maximum(self._largest.read_value(), finite), read_value=True)
        by_place = {
            place: tf.math.divide_no_nan(tf.sqrt(sum_of_squares(own - mean)), largest)
            for place, own, mean in zip(here, mine, means, strict=True)
        }
        self._deviations.assign([by_place.get(place, tf.zeros_like(largest)) for place in self._places])

    def diverging_gradients(self, paths: Sequence[str], model: Any) -> dict[str, float]:
        """Return gradients by path that last deviated by more than rounding.

        The deviation is the L2 norm of the difference from the mean, relative to that of all full gradients together,
        at its largest so far: a gradient that is pure rounding, as of a bias before a norm, has no matching digits.

        Args:
            model: built; its layers' dtypes determine the rounding.
        """
        found = [] if self._deviations is None else self._deviations.numpy().tolist()
        by_path = {paths[place]: deviation for place, deviation in zip(self._places, found, strict=True)}
        bound = _rounding_of(model) if by_path else 0.0
        return {path: deviation for path, deviation in by_path.items() if deviation > bound}


def _rounding_of(model: Any) -> float:
    layers = (model, *flatten_layers(model, include_self=False))
    return max(ROUNDING.get(layer.compute_dtype, FLOAT32) for layer in layers)


def _is_alike(placement: Placement | None) -> bool:
    # A sum over tp is equal along tp, but the subsequent reduction over replicas may round it differently.
    return placement is None or AXIS not in placement.axes


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Gradient, values: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


_Division: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes along which a variable is sharded, and replica axes along which its gradient is sharded."""


class SplitModel:
    """Reductions and norms for variables sharded along tp, ep or pp."""

    def __init__(self, backend: Backend, variables: Sequence[Any]) -> None:
        self._backend = backend
        self._placements = [placement_of(variable) for variable in variables]
        self.exchanges = backend.job_size > backend.size or any(self._placements)
        """Whether this rank holds only part of the model."""
        self.replicated = ReplicatedGradients(backend, self._placements)
        """Averages gradients that several ranks of a replica compute in full."""

    def reducer(self, options: ReductionOptions, paths: Sequence[str]) -> GradientReducer | None:
        """Return a reducer over the ranks with the same shard; None if these are all replicas."""
        held = {
            path: self._axes_of_replicas(placement)
            for path, placement in zip(paths, self._placements, strict=True)
            if placement is not None and placement.held_by
        }
        sums = ReductionOptions(**{**vars(options), "reduce_op": "sum"}) if options.reduce_op == "average" else options
        return PlacedReducer(self._backend, sums, held) if held else None

    def summed(self, gradients: Sequence[Gradient], paths: Sequence[str]) -> list[Gradient]:
        """All-reduce gradients that are partial on the ranks of a replica. Collective."""
        whole = list(gradients)
        for place, (gradient, placement) in enumerate(zip(gradients, self._placements, strict=True)):
            if gradient is not None and placement is not None and placement.summed_over:
                exchange = self._backend.along(*placement.summed_over)
                dense = tf.convert_to_tensor(gradient)
                whole[place] = exchange.all_reduce(dense, name=f"gradient_part/{paths[place]}")
        return whole

    def norm(self, gradients: Sequence[Gradient], sliced: Sequence[bool] = ()) -> tf.Tensor:
        """Return the L2 norm of the full model's gradient, float64; `sliced` ones are sharded over replicas.

        Collective.
        """
        if not self.exchanges and not any(sliced):
            return tf.sqrt(square_sum(gradients))
        by_axes: dict[_Division, list[Gradient]] = {}
        for place, (gradient, placement) in enumerate(zip(gradients, self._placements, strict=True)):
            if placement is None or placement.in_norm:
                replicas = self._axes_of_replicas(placement) if sliced and sliced[place] else ()
                division = () if placement is None else placement.axes, replicas
                by_axes.setdefault(division, []).append(gradient)
        none = tf.zeros([], tf.float64)  # all of a stage's weights may be tied, and count elsewhere
        squares = ordered_sum([none, *self._squares(by_axes.items())])
        if self.exchanges:
            squares = self._backend.along("pp").all_reduce(squares, name="gradient//stage_norm")
        return tf.sqrt(squares)

    def _squares(self, by_axes: Iterable[tuple["_Division", list[Gradient]]]) -> Iterable[tf.Tensor]:
        """Yield global sums of squares per group of equally sharded gradients."""
        for (axes, replicas), gradients in sorted(by_axes):
            mine = square_sum(gradients)
            if replicas:
                name = f"gradient//norm/slices/{'.'.join(axes)}"
                mine = self._along_replicas(replicas).all_reduce(mine, name=name)
            name = f"gradient//norm{'/slices' if replicas else ''}"
            yield self._backend.along(*axes).all_reduce(mine, name=name) if axes else mine

    def replicas_of(self, variable: Any) -> Collectives:
        """Return the collectives among replicas with the same shard of `variable`."""
        return self._along_replicas(self._axes_of_replicas(placement_of(variable)))

    def _axes_of_replicas(self, placement: Placement | None) -> tuple[str, ...]:
        """Return the axes along which replicas hold the same shard."""
        return tuple(axis for axis in REPLICA_AXES if placement is None or axis not in placement.held_by)

    def _along_replicas(self, axes: tuple[str, ...]) -> Collectives:
        return self._backend if axes == REPLICA_AXES else self._backend.along(*axes)

    def agreed(self, totals: tf.Tensor) -> tf.Tensor:
        """Combine all parts' verdicts in a guarded step's totals. Collective."""
        if not self.exchanges:
            return totals
        flags = totals[VERDICT_PARTS]
        for axis in ("ep", "tp", "pp"):
            flags = self._backend.along(axis).all_reduce(flags, name="gradient//flags")
        return tf.concat([totals[: VERDICT_PARTS.start], flags], 0)


class PlacedReducer(GradientReducer):
    """Reduces gradients of shards along their axes, others globally."""

    def __init__(self, backend: Backend, options: ReductionOptions, held: dict[str, tuple[str, ...]]) -> None:
        super().__init__(backend, options)
        self._held = held
        self._reducers = {axes: GradientReducer(backend.along(*axes), options) for axes in set(held.values())}

    def reduce(
        self,
        gradients: Sequence[Gradient],
        paths: Sequence[str],
        *,
        role: str = "gradient",
        exact: Collection[str] = (),
    ) -> list[Gradient]:
        """Reduce each gradient among its group. Collective."""
        reduced: list[Gradient] = [None] * len(gradients)
        for axes in [None, *sorted(self._reducers)]:
            places = [i for i, path in enumerate(paths) if self._held.get(path) == axes]
            reduce = super().reduce if axes is None else self._reducers[axes].reduce
            mine = reduce([gradients[i] for i in places], [paths[i] for i in places], role=role, exact=exact)
            for i, gradient in zip(places, mine, strict=True):
                reduced[i] = gradient
        return reduced


def overflowing_together(gradients: Sequence[Gradient], norm: tf.Tensor) -> list[Gradient]:
    """Spread an overflow to all ranks, so that all skip the step.

    `norm`, over all ranks, is not finite on an overflow. Raises ConfigError if this rank trains nothing.
    """
    sizes = {i: gradient.shape.num_elements() for i, gradient in enumerate(gradients) if tf.is_tensor(gradient)}
    places = [place for place, size in sizes.items() if size]
    if not places:
        raise ConfigError(
            "With float16 every rank must hold a weight that is trained, to keep its loss scale that of the others: "
            "train a layer that all ranks have, or compute in bfloat16 or float32."
        )
    smallest = min(places, key=lambda place: sizes[place] or 0)
    shared = list(gradients)
    poison = tf.where(tf.math.is_finite(norm), tf.zeros_like(norm), tf.constant(float("nan"), norm.dtype))
    shared[smallest] = shared[smallest] + tf.cast(poison, shared[smallest].dtype)
    return shared
