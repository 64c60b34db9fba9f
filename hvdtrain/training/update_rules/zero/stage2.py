"""ZeRO stage 2: sharded gradients, too.

Each gradient is reduce-scattered within the backward pass, and few are in memory in full at a time. With `--accumulate`
every microbatch is reduce-scattered and shards are accumulated: more messages than one reduction at the end, which
would need all full gradients until then.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple

import tensorflow as tf

from hvdtrain.compat.tensorflow import add_control_inputs
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.runtime.compiled import numbered
from hvdtrain.training.step.contract import Collected, Parameters, Pass
from hvdtrain.training.step.finite import poison_of
from hvdtrain.training.update_rules.zero.reducer import scattered
from hvdtrain.training.update_rules.zero.shards import Shard
from hvdtrain.training.update_rules.zero.stage1 import ZeroUpdate
from hvdtrain.training.update_rules.zero.window import Window, size_of, window_for


class ScatteredGradientsUpdate(ZeroUpdate):
    """Sharded gradients and optimizer state."""

    _stage = 2

    def _scattered_in_passes(self) -> frozenset[str]:
        """Exclude tied weights: their gradients are first summed over pipeline stages."""
        tied = self.model.tied if isinstance(self.model, PipelineStage) else ()
        return frozenset(path for path in self._by_path if path not in tied)

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """Return parameters with sharded gradients."""
        scattered = {path: self._by_path[path] for path in self._scattered_in_passes()}
        return ScatteredGradients(trainable, scattered, guarded=self.guard is not None)


class ScatteredGradients(Parameters):
    """Full parameters with sharded gradients, checked for finiteness if `guarded`."""

    def __init__(self, trainable: Mapping[str, tf.Variable], shards: Mapping[str, Shard], *, guarded: bool) -> None:
        super().__init__(trainable)
        self._shards = shards
        self._guarded = guarded

    @contextmanager
    def passes(self, has_samples: tf.Tensor | float) -> Iterator[Pass]:
        """Reduce-scatter the gradients of both passes."""
        yield _ScatteringPass(has_samples, self.sources(), self)

    def scatter(self, computed: Sequence[Gradient], counted: Sequence[Gradient]) -> Collected:
        """Return sharded gradients; `counted` are `computed`, or zeros without samples. Collective."""
        poison = tf.stack([poison_of(gradient) for gradient in counted]) if self._guarded else None
        paths = list(self._trainable)
        sharded = [i for i, path in enumerate(paths) if path in self._shards and counted[i] is not None]
        dense = {i: tf.convert_to_tensor(counted[i]) for i in sharded}
        for i, gradient in dense.items():  # of looked-up rows, a stage's backward pass does not know how many there are
            gradient.set_shape(self._trainable[paths[i]].shape)
        slices = {i: scattered(dense[i], self._shards[paths[i]], numbered(f"gradient/{paths[i]}")) for i in sharded}
        _hold_back([_Exchanged(_maker(computed[i], dense[i]), dense[i], slices[i]) for i in sharded], self._window())
        return Collected([slices.get(i, gradient) for i, gradient in enumerate(counted)], poison)

    def _window(self) -> Window:
        return window_for(self._shards.values())


class _ScatteringPass(Pass):
    def __init__(
        self, has_samples: tf.Tensor | float, sources: Sequence[tf.Variable], parameters: ScatteredGradients
    ) -> None:
        super().__init__(has_samples, sources)
        self._parameters = parameters

    def collected(self, gradients: Sequence[Gradient]) -> Collected:
        return self._parameters.scatter(gradients, super().collected(gradients).gradients)


class _Exchanged(NamedTuple):
    """A reduce-scattered gradient."""

    maker: tf.Tensor
    """First tensor of its size; zeros may replace it if a replica may have no samples."""
    whole: tf.Tensor
    slice: tf.Tensor


def _maker(computed: Gradient, dense: tf.Tensor) -> tf.Tensor:
    """Return the first tensor of the full gradient's size; sparse rows are smaller."""
    return dense if isinstance(computed, tf.IndexedSlices) else computed


def _hold_back(exchanged: Sequence[_Exchanged], window: Window) -> None:
    """Compute a gradient after most earlier reduce-scatters, within `window` bytes."""
    if not exchanged or tf.executing_eagerly():
        return
    graph = exchanged[0].whole.graph
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    by_place = lambda each: places[each.maker.op.name]  # noqa: E731
    # Only earlier operations may be waited for. A compiled function produces all of its outputs at once.
    for _, group in groupby(sorted(exchanged, key=by_place), key=by_place):
        together = list(group)
        add_control_inputs(together[0].maker.op, window.before(sum(size_of(each.whole) for each in together)))
        for each in together:
            window.add(size_of(each.whole), each.slice.op)
