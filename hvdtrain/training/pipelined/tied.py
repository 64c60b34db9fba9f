"""Gradient reduction of weights shared by several stages, such as tied embeddings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.config.parallel import USER_AXES
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.parallel.pipeline.stage import PipelineStage, TiedWeight, stage_assignment_of
from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.placement import Placement, place, placement_of, whole_box
from hvdtrain.state.variables import unwrap


class TiedGradients:
    """Sums the gradients of tied weights over the stages that share them.

    All stages of the pipeline participate, with zeros if they lack the weight: process sets are fixed when the job
    starts, but tied weights are only known with the model.

    With more than two replicas, the sum is over all of them at once: separate reductions per stage would use different
    orders, and stages would diverge by rounding. Expert weights are excluded, since they differ between replicas.

    Args:
        backend: the replicas, and the other mesh axes.
        keep: receives each sum, so that it is not pruned on stages without the weight.
    """

    def __init__(
        self,
        stage: PipelineStage,
        backend: Backend,
        trainable: Mapping[str, tf.Variable],
        keep: Callable[[tf.Tensor], None],
    ) -> None:
        self._stages, self._users = backend.along("pp"), backend.along(*USER_AXES)
        self._several = backend.size > 2
        self._contributes = backend.index == 0
        """Whether this replica contributes the sum to the reduction over replicas; others contribute zeros."""
        self._keep = keep
        self._places = {path: place for place, path in enumerate(trainable)}
        self.among_replicas = any(self._at_once(weight) for weight in stage.tied.values())
        """Whether tied gradients are already summed over the replicas."""
        self._tied = {path: weight for path, weight in stage.tied.items() if weight.trainable}

    def summed(self, gradients: Sequence[Gradient]) -> list[Gradient]:
        """Return the gradients with those of tied weights summed over the stages. Collective."""
        summed = list(gradients)
        for path, weight in self._tied.items():
            place = self._places.get(path)
            mine = None if place is None else gradients[place]
            zeros = tf.fill(weight.shape, tf.zeros([], weight.dtype))
            dense = zeros if mine is None else tf.convert_to_tensor(mine)
            at_once = self._at_once(weight)
            total = (self._users if at_once else self._stages).all_reduce(dense, name=f"tied_gradient/{path}")
            self._keep(total)
            if place is not None:
                summed[place] = tf.zeros_like(total) if at_once and not self._contributes else total
        return summed

    def _at_once(self, weight: TiedWeight) -> bool:
        return self._several and weight.trainable and not weight.expert_parallel


def share_tied_weights(stage: PipelineStage, pipeline: Collectives) -> None:
    """Broadcast tied weights from their first rank, which counts them in norms. Collective.

    Called while ranks still have the full model's variables; those of other ranks may be uninitialized.
    """
    whole = {stage.structure.path(variable): variable for variable in stage.whole.model.variables}
    for path, weight in stage.tied.items():
        variable = unwrap(whole[path])
        first = stage.place == weight.places[0]
        mine = variable.read_value() if first else tf.zeros(weight.shape, weight.dtype)
        holder = variable if stage.place in weight.places else None
        run_once(partial(_assign_sum, holder, mine, pipeline, f"tied/{path}"))
        slice_or_whole = placement_of(variable) or Placement(weight.shape, whole_box(weight.shape))
        place(variable, replace(slice_or_whole, in_norm=stage.counts(variable)))


def gather_stages(stage: PipelineStage, pipeline: Collectives) -> None:
    """Collect distributed stages' weights on all ranks. Collective."""
    division = stage_assignment_of(stage.whole.model)
    if division is None:
        return
    for path, weight in _by_path(stage).items():
        variable = unwrap(weight)
        trained_here = stage.place == division.places[path]
        mine = variable.read_value() if trained_here else tf.zeros(variable.shape, variable.dtype)
        run_once(partial(_assign_sum, variable, mine, pipeline, f"divided/{path}"))
        placement = placement_of(variable)
        if path in division.tied and placement is not None:
            place(variable, replace(placement, in_norm=True))


def _by_path(stage: PipelineStage) -> dict[str, Any]:
    return {stage.structure.path(weight): weight for weight in stage.whole.model.weights}


def _assign_sum(variable: tf.Variable | None, mine: tf.Tensor, pipeline: Collectives, name: str) -> tf.Tensor:
    total = pipeline.all_reduce(mine, name=name)
    if variable is not None:
        variable.assign(total)
    return total  # keeps TensorFlow from pruning it if nothing is assigned
