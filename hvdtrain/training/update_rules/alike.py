"""Gradients that several ranks compute of the same weights from the same samples: made the same to the last bit.

Ranks along tp hold norms, most biases and position embeddings whole, and each computes their gradients by itself. Those
are equal but for rounding, which differs: TensorFlow adds up three tensors or more in the order in which buffers can be
reused (`AddN`), hence by timing, and on a GPU in the order in which threads come. Weights would drift apart.
"""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.gradients.reduction import Gradient, GradientReducer, ReductionOptions
from hvdtrain.optim.clipping import ordered_sum, sum_of_squares
from hvdtrain.state.placement import Placement

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
