"""The update where ranks hold different parts of one model: who shares which gradient, and what all must agree on."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import REPLICA_AXES
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.optim.clipping import ordered_sum, square_sum
from hvdtrain.state.placement import Placement, placement_of
from hvdtrain.training.step.guard import VERDICT_PARTS
from hvdtrain.training.update_rules.alike import AlikeGradients

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
