"""What a rank of a pipeline trains of one stage."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import tensorflow as tf

from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.parallel import ScheduleName
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.layers.exchanging import ExchangingLayer, samples_of
from hvdtrain.layers.recompute import recomputed
from hvdtrain.parallel.pipeline.graph import variables_of
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from hvdtrain.runtime.compiled import names_under
from hvdtrain.state.structure import statistics_of
from hvdtrain.state.variables import unwrap
from hvdtrain.training.pipelined.losses import adds_losses, shared_up_to
from hvdtrain.training.step.parameters import Parameters
from hvdtrain.training.step.placeholder import unmoved

ParametersOf: TypeAlias = Callable[[Mapping[str, tf.Variable]], Parameters]


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How microbatches pass the stages."""

    schedule: ScheduleName
    chunks: int
    """Stages on each rank."""
    microbatches: int
    """Of a full batch."""
    length: int
    """Samples of a microbatch."""
    recompute: bool = False
    """Keep what a stage has received, and call it again in the backward pass."""


class StageTraining:
    """One of the stages of a rank: its variables, the sums of their gradients, and its compiled forward pass.

    Args:
        stage: what the rank holds.
        number: of this stage in the pipeline.
        trainable: the variables that the rank trains, by path.
        options: how microbatches pass the stages.
        parameters_of: see `UpdateRule.parameters`.
    """

    def __init__(
        self,
        stage: PipelineStage,
        number: int,
        trainable: Mapping[str, tf.Variable],
        options: PipelineOptions,
        parameters_of: ParametersOf,
    ) -> None:
        self.number = number
        self.stage = stage
        self.cut = stage.whole.cut
        self.is_last = number + 1 == self.cut.stages
        nodes = self.cut.nodes(number)
        self.adds_losses = adds_losses(self.cut, number)
        self.needs_share = shared_up_to(self.cut, number)
        """Whether the stage, or one before it, adds losses and must know what they count."""
        self.passes_share = number > 0 and shared_up_to(self.cut, number - 1)
        """Whether the stage before must know it."""
        used = {id(unwrap(variable)) for variable in variables_of(nodes)}
        self.variables = {path: v for path, v in trainable.items() if id(v) in used}
        self.parameters = parameters_of(self.variables)
        self.layers = list({id(layer): layer for node in nodes for layer in flatten_layers(node.operation)}.values())
        """Those that the stage calls, nested ones too."""
        self._statistics = [variable for layer in self.layers for variable in statistics_of(layer)]
        self.exchanging = [layer for layer in self.layers if isinstance(layer, ExchangingLayer)]
        self.volatile = [v for v in variables_of(nodes) if not v.trainable]
        self._sum = GradientSum(list(self.variables.values()), give_back=True)
        self._single: list[Gradient] | None = None
        # 1F1B takes the backward pass of the last stage right after its forward pass: nothing to gain.
        at_once = self.is_last and options.schedule == "1f1b"
        self._recompute = options.recompute and not at_once
        # Traced once, and called for each microbatch.
        self._compiled = tf.function(self._forward, autograph=False)

    def forward(
        self, known: Mapping[int, Any], received: Sequence[tf.Tensor], has_samples: tf.Tensor | float
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Return what the stage passes on, masks last, and the loss that its layers add, if they add one."""
        presence = [has_samples] if tf.is_tensor(has_samples) else []
        tensors: list[tf.Tensor] = self._compiled(list(known.values()), list(received), *presence)
        return (tensors[:-1], tensors[-1]) if self.adds_losses else (tensors, None)

    def _forward(
        self, inputs: list[Any], received: list[tf.Tensor], has_samples: tf.Tensor | float = 1.0
    ) -> list[tf.Tensor]:
        known = dict(zip(map(id, self.cut.graph.inputs), inputs, strict=True))
        with (
            names_under(f"stage{self.number}"),
            unmoved(self._statistics, has_samples),
            samples_of(self.exchanging, has_samples),
        ):
            if self._recompute:
                repeated = RepeatedStage(self, known, has_samples)
                outputs = list(recomputed(repeated, received or inputs, self.layers))
            else:
                outputs = self.outputs(known, received)
            return [*outputs, self.stage.take_losses()] if self.adds_losses else outputs

    def outputs(self, known: Mapping[int, Any], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Call the stage's layers in training."""
        made = self.stage.run_stage(self.number, known, received, training=True)
        return with_masks(self.cut, self.number, made)

    def add(self, gradients: Sequence[Gradient], *, microbatch: int, only: bool) -> None:
        """Add the gradients of a microbatch to the sums; of a batch of `only` one they are the sums."""
        if only:
            self._single = list(gradients)
        else:
            self._single = None
            self._sum.add(gradients, first=microbatch == 0)

    def read(self) -> list[Gradient]:
        """Return the sums."""
        return self._sum.read() if self._single is None else self._single


class RepeatedStage:
    """A stage as `recomputed` calls it: as if it were a layer of the tensors that it received."""

    def __init__(self, stage: StageTraining, known: Mapping[int, Any], has_samples: tf.Tensor | float) -> None:
        self._stage = stage
        self._known = known
        self._has_samples = has_samples
        self._again = False
        self.non_trainable_variables = stage.volatile

    def __call__(self, tensors: Any, *, training: bool) -> list[tf.Tensor]:
        """Return what the stage passes on, for what it received or, as the first, for the model's inputs."""
        if not self._again:
            self._again = True
            return self._outputs(tensors)
        # TensorFlow builds the backward pass when the step asks for it: what was around the first pass is not any more.
        with (
            names_under(f"stage{self._stage.number}/again"),
            samples_of(self._stage.exchanging, self._has_samples),
        ):
            return self._outputs(tensors)

    def _outputs(self, tensors: Any) -> list[tf.Tensor]:
        if self._stage.number:
            return self._stage.outputs(self._known, list(tensors))
        return self._stage.outputs(dict(zip(self._known, tensors, strict=True)), [])
