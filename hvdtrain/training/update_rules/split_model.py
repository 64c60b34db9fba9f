"""The update where ranks hold different parts of one model: who shares which gradient, and what all must agree on.

Ranks along tp hold norms, most biases and position embeddings whole, and each computes their gradients by itself. Those
are equal but for rounding, which differs: TensorFlow adds up three tensors or more in the order in which buffers can be
reused (`AddN`), hence by timing, and on a GPU in the order in which threads come. Weights would drift apart.
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
from hvdtrain.state.placement import Placement, placement_of
from hvdtrain.training.step.guard import VERDICT_PARTS

AXIS = "tp"
ROUNDING = {"float16": 5e-2, "bfloat16": 5e-2}
"""By the dtype that layers compute in, how far gradients lie apart by rounding at most, as a part of their norm: far
above what another order of sums comes to, and below what other random numbers do. `FLOAT32` for all others."""
FLOAT32 = 1e-3


class AlikeGradients:
    """Averages the gradients of what ranks along tp hold whole, and measures how far they lay apart.

    Args:
        backend: the ranks.
        placements: of the variables that are trained; slices are left as they are.
    """

    def __init__(self, backend: Backend, placements: Sequence[Placement | None]) -> None:
        several = backend.axes.get(AXIS, 1) > 1
        self._places = [i for i, placement in enumerate(placements) if several and _is_alike(placement)]
        self._backend = backend
        self._deviations = (
            tf.Variable(tf.zeros([len(self._places)], tf.float64), trainable=False) if self._places else None
        )
        self._largest = tf.Variable(0.0, trainable=False, dtype=tf.float64) if self._places else None
        """Norm of the largest gradient that was measured. That of later ones goes to zero, and rounding does not."""

    def agreed(self, gradients: Sequence[Gradient], paths: Sequence[str], *, measure: bool) -> list[Gradient]:
        """Return the gradients, the same on all ranks along tp that hold the same.

        Args:
            gradients: reduced over the replicas, whole or each replica's slice. Sparse ones have the same rows on all
                ranks along tp, which see the same samples.
            paths: of their variables.
            measure: whether to note how far they lie apart; see `apart`.
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
        """Return those of the variables' paths that ranks along tp hold whole."""
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

    def apart(self, paths: Sequence[str], model: Any) -> dict[str, float]:
        """Return by path those whose gradients lay further apart than by rounding when they were last measured.

        Each with its deviation from the mean: the L2 norm of the difference as a part of that of all the gradients that
        are alike together, at its largest so far. Of one that is nothing but rounding, as of a bias in front of a norm,
        no digit agrees.

        Args:
            paths: of the variables.
            model: built, whose layers' dtypes tell what is rounding.
        """
        found = [] if self._deviations is None else self._deviations.numpy().tolist()
        by_path = {paths[place]: deviation for place, deviation in zip(self._places, found, strict=True)}
        bound = _rounding_of(model) if by_path else 0.0
        return {path: deviation for path, deviation in by_path.items() if deviation > bound}


def _rounding_of(model: Any) -> float:
    layers = (model, *flatten_layers(model, include_self=False))
    return max(ROUNDING.get(layer.compute_dtype, FLOAT32) for layer in layers)


def _is_alike(placement: Placement | None) -> bool:
    # A sum over tp is the same there, and may be rounded differently by the exchange among replicas behind it.
    return placement is None or AXIS not in placement.axes


def _values(gradient: Gradient) -> tf.Tensor:
    return gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient


def _with_values(gradient: Gradient, values: tf.Tensor) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return values


_Division: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes along which a variable is split, and those of the replicas that have divided its gradient."""


class SplitModel:
    """What an update rule asks about variables of which this rank holds a slice, or that other ranks do not have.

    Args:
        backend: the replicas, and the other axes of the mesh.
        variables: those that are trained, in the order of their gradients.
    """

    def __init__(self, backend: Backend, variables: Sequence[Any]) -> None:
        self._backend = backend
        self._placements = [placement_of(variable) for variable in variables]
        self.exchanges = backend.job_size > backend.size or any(self._placements)
        """Whether this rank does not hold the whole model."""
        self.alike = AlikeGradients(backend, self._placements)
        """Makes gradients the same that several ranks of a replica compute whole."""

    def reducer(self, options: ReductionOptions, paths: Sequence[str]) -> GradientReducer | None:
        """Return what adds gradients up among those that hold the same slice; None where those are all replicas."""
        held = {
            path: self._axes_of_replicas(placement)
            for path, placement in zip(paths, self._placements, strict=True)
            if placement is not None and placement.held_by
        }
        sums = ReductionOptions(**{**vars(options), "reduce_op": "sum"}) if options.reduce_op == "average" else options
        return PlacedReducer(self._backend, sums, held) if held else None

    def summed(self, gradients: Sequence[Gradient], paths: Sequence[str]) -> list[Gradient]:
        """Add up those gradients of which other ranks of the same replica have a part."""
        whole = list(gradients)
        for place, (gradient, placement) in enumerate(zip(gradients, self._placements, strict=True)):
            if gradient is not None and placement is not None and placement.summed_over:
                exchange = self._backend.along(*placement.summed_over)
                dense = tf.convert_to_tensor(gradient)
                whole[place] = exchange.all_reduce(dense, name=f"gradient_part/{paths[place]}")
        return whole

    def norm(self, gradients: Sequence[Gradient], sliced: Sequence[bool] = ()) -> tf.Tensor:
        """Return the L2 norm of the gradient of the whole model, a float64 scalar, the same on every rank.

        Args:
            gradients: this rank's.
            sliced: which of them are slices that the replicas have divided among them; by default none.
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
        return tf.sqrt(self._over_stages(squares) if self.exchanges else squares)

    def _squares(self, by_axes: Iterable[tuple["_Division", list[Gradient]]]) -> Iterable[tf.Tensor]:
        """Yield the squares of all slices of what is divided along each of the axes."""
        for (axes, replicas), gradients in sorted(by_axes):
            mine = square_sum(gradients)
            if replicas:
                name = f"gradient//norm/slices/{'.'.join(axes)}"
                mine = self._along_replicas(replicas).all_reduce(mine, name=name)
            name = f"gradient//norm{'/slices' if replicas else ''}"
            yield self._backend.along(*axes).all_reduce(mine, name=name) if axes else mine

    def replicas_of(self, variable: Any) -> Collectives:
        """Return the collectives among the replicas that hold the same of `variable` as this one."""
        return self._along_replicas(self._axes_of_replicas(placement_of(variable)))

    def _axes_of_replicas(self, placement: Placement | None) -> tuple[str, ...]:
        """Return the axes along which replicas hold the same slice."""
        return tuple(axis for axis in REPLICA_AXES if placement is None or axis not in placement.held_by)

    def _along_replicas(self, axes: tuple[str, ...]) -> Collectives:
        return self._backend if axes == REPLICA_AXES else self._backend.along(*axes)

    def _over_stages(self, mine: tf.Tensor) -> tf.Tensor:
        return self._backend.along("pp").all_reduce(mine, name="gradient//stage_norm")

    def agreed(self, totals: tf.Tensor) -> tf.Tensor:
        """Return a guarded step's totals with what any part of the model found bad, the same on every rank."""
        if not self.exchanges:
            return totals
        flags = totals[VERDICT_PARTS]
        for axis in ("ep", "tp", "pp"):
            flags = self._backend.along(axis).all_reduce(flags, name="gradient//flags")
        return tf.concat([totals[: VERDICT_PARTS.start], flags], 0)


class PlacedReducer(GradientReducer):
    """Adds up the gradients of slices among those replicas that hold the same ones, and the others among all.

    Args:
        backend: the replicas.
        options: how gradients travel.
        held: axes along which the gradient of a slice is added up, by path.
    """

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
        """See `GradientReducer`."""
        reduced: list[Gradient] = [None] * len(gradients)
        for axes in [None, *sorted(self._reducers)]:
            places = [i for i, path in enumerate(paths) if self._held.get(path) == axes]
            reduce = super().reduce if axes is None else self._reducers[axes].reduce
            mine = reduce([gradients[i] for i in places], [paths[i] for i in places], role=role, exact=exact)
            for i, gradient in zip(places, mine, strict=True):
                reduced[i] = gradient
        return reduced


def overflowing_together(gradients: Sequence[Gradient], norm: tf.Tensor) -> list[Gradient]:
    """Spread an overflow in any rank's gradients to all ranks, so that all skip the step and lower the loss scale.

    Args:
        gradients: this rank's. Some may be of slices that have no elements, which cannot overflow.
        norm: of those of all ranks; not finite if one of them is not.

    Raises:
        ConfigError: this rank trains nothing.
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
