"""Variables, gradient sums and the compiled forward pass of one pipeline stage."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Collectives
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.gradients.gradient_sum import GradientSum
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.layers.exchanging import ExchangingLayer, exchanging_layers, samples_of
from hvdtrain.layers.experts import MixtureOfExperts
from hvdtrain.layers.recompute import recomputed
from hvdtrain.parallel.pipeline.cut import Cut
from hvdtrain.parallel.pipeline.exchange import Spec
from hvdtrain.parallel.pipeline.graph import variables_of
from hvdtrain.parallel.pipeline.stage import PipelineStage, with_masks
from hvdtrain.runtime.compiled import names_under
from hvdtrain.state.structure import statistics_of
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import Parameters
from hvdtrain.training.step.placeholder import restored_if_empty

ParametersOf: TypeAlias = Callable[[Mapping[str, tf.Variable]], Parameters]


class StageTraining:
    """One of a rank's stages: variables, gradient sums and compiled forward pass."""

    def __init__(
        self,
        stage: PipelineStage,
        number: int,
        trainable: Mapping[str, tf.Variable],
        options: StepOptions,
        parameters_of: ParametersOf,
    ) -> None:
        self.number = number
        self.stage = stage
        self.cut = stage.whole.cut
        self.is_last = number + 1 == self.cut.stages
        nodes = self.cut.nodes(number)
        self.adds_losses = adds_losses(self.cut, number)
        self.needs_share = shared_up_to(self.cut, number)
        """Whether this stage, or one before it, adds losses and needs their weight."""
        self.passes_share = number > 0 and shared_up_to(self.cut, number - 1)
        """Whether the previous stage needs it."""
        used = {id(unwrap(variable)) for variable in variables_of(nodes)}
        self.variables = {path: v for path, v in trainable.items() if id(v) in used}
        self.parameters = parameters_of(self.variables)
        self.layers = list({id(layer): layer for node in nodes for layer in flatten_layers(node.operation)}.values())
        """The stage's layers, nested ones too."""
        self._statistics = [variable for layer in self.layers for variable in statistics_of(layer)]
        self.exchanging = [layer for layer in self.layers if isinstance(layer, ExchangingLayer)]
        self.volatile = [v for v in variables_of(nodes) if not v.trainable]
        self._sum = GradientSum(list(self.variables.values()), give_back=True)
        self._single: list[Gradient] | None = None
        # 1F1B takes the backward pass of the last stage right after its forward pass: nothing to gain.
        at_once = self.is_last and options.pipeline_schedule == "1f1b"
        self._recompute = options.recompute and not at_once
        # Traced once, and called for each microbatch.
        self._compiled = tf.function(self._forward, autograph=False)

    def forward(
        self, known: Mapping[int, Any], received: Sequence[tf.Tensor], has_samples: tf.Tensor | float
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """Return the stage's outputs, masks last, and its layers' loss, if any."""
        presence = [has_samples] if tf.is_tensor(has_samples) else []
        tensors: list[tf.Tensor] = self._compiled(list(known.values()), list(received), *presence)
        return (tensors[:-1], tensors[-1]) if self.adds_losses else (tensors, None)

    def _forward(
        self, inputs: list[Any], received: list[tf.Tensor], has_samples: tf.Tensor | float = 1.0
    ) -> list[tf.Tensor]:
        known = dict(zip(map(id, self.cut.graph.inputs), inputs, strict=True))
        with (
            names_under(f"stage{self.number}"),
            restored_if_empty(self._statistics, has_samples, shared=True),
            samples_of(self.exchanging, has_samples),
        ):
            if self._recompute:
                repeated = RepeatedStage(self, known, has_samples)
                outputs = list(recomputed(repeated, received or inputs, self.layers))
            else:
                outputs = self.outputs(known, received)
            return [*outputs, self.stage.pop_losses()] if self.adds_losses else outputs

    def outputs(self, known: Mapping[int, Any], received: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Call the stage's layers in training."""
        made = self.stage.run_stage(self.number, known, received, training=True)
        return with_masks(self.cut, self.number, made)

    def add(self, gradients: Sequence[Gradient], *, microbatch: int, only: bool) -> None:
        """Add a microbatch's gradients to the sums; with `only` one, replace them."""
        if only:
            self._single = list(gradients)
        else:
            self._single = None
            self._sum.add(gradients, first=microbatch == 0)

    def read(self) -> list[Gradient]:
        """Return the sums."""
        return self._sum.read() if self._single is None else self._single


class RepeatedStage:
    """A stage in the form that `recomputed` calls: as a layer of the received tensors."""

    def __init__(self, stage: StageTraining, known: Mapping[int, Any], has_samples: tf.Tensor | float) -> None:
        self._stage = stage
        self._known = known
        self._has_samples = has_samples
        self._again = False
        self.non_trainable_variables = stage.volatile

    def __call__(self, tensors: Any, *, training: bool) -> list[tf.Tensor]:
        """Return outputs for received tensors, or for the first stage's inputs."""
        if not self._again:
            self._again = True
            return self._outputs(tensors)
        # TensorFlow builds the backward pass later, outside the contexts of the first pass.
        with (
            names_under(f"stage{self._stage.number}/again"),
            samples_of(self._stage.exchanging, self._has_samples),
        ):
            return self._outputs(tensors)

    def _outputs(self, tensors: Any) -> list[tf.Tensor]:
        if self._stage.number:
            return self._stage.outputs(self._known, list(tensors))
        return self._stage.outputs(dict(zip(self._known, tensors, strict=True)), [])


SHARE_SPEC = Spec((2,), tf.dtypes.float64)
"""Spec of what a stage's own loss in a microbatch counts, which travels between stages: the weight of the microbatch's
loss on this replica, and its upstream gradient.
"""


class WeightedLoss(NamedTuple):
    """The loss of a microbatch on the last stage; scalars of one dtype."""

    total: tf.Tensor
    """Loss x weight."""
    weight: tf.Tensor
    """Its number of samples, or what the loss was divided by."""
    expected: tf.Tensor
    """Number of samples of the step over all replicas."""


def adds_losses(cut: Cut, stage: int) -> bool:
    """Return whether a stage's layers add losses in training."""
    layers = (node.operation for node in cut.nodes(stage))
    return any(isinstance(each, MixtureOfExperts) for layer in layers for each in exchanging_layers(layer))


def shared_up_to(cut: Cut, stage: int) -> bool:
    """Return whether a stage up to this one adds weighted losses."""
    return any(adds_losses(cut, number) for number in range(stage + 1))


class Regularization:
    """Weight penalties of a pipeline rank; a tied weight counts on its first rank.

    A penalty does not depend on the samples, so it is added once per step, times the sum of the loss weights.
    """

    def __init__(self, stage: PipelineStage) -> None:
        self._variables = [
            variable
            for variable in stage.trainable_variables
            if variable.regularizer is not None and stage.counts(variable)
        ]

    @property
    def applies(self) -> bool:
        """Whether this rank has penalties."""
        return bool(self._variables)

    def value(self) -> tf.Tensor:
        """Return the sum of this rank's penalties, in float64."""
        each = [tf.cast(variable.regularizer(variable), tf.float64) for variable in self._variables]
        return tf.add_n(each) if each else tf.zeros([], tf.float64)

    def gradients(self, trainable: Mapping[str, tf.Variable], factor: tf.Tensor) -> list[Gradient]:
        """Return the gradients of `factor` (float64) times the penalties; None for variables without one."""
        penalized = {id(unwrap(variable)) for variable in self._variables}
        with tf.GradientTape() as tape:
            penalty = self.value()
        variables = {path: variable for path, variable in trainable.items() if id(variable) in penalized}
        found = dict(
            zip(variables, tape.gradient(penalty, list(variables.values()), output_gradients=factor), strict=True)
        )
        return [found.get(path) for path in trainable]


class MetricsBackend:
    """Backend that also sums over a replica's stages; all but the last (`counts`) contribute zero."""

    def __init__(self, backend: Backend, pipeline: Collectives, *, counts: bool) -> None:
        self._backend = backend
        self._pipeline = pipeline
        self.counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def all_reduce(self, tensor: tf.Tensor, *, name: str, **options: Any) -> tf.Tensor:
        """Sum elementwise over the replicas, then over the stages. Collective."""
        mine = self._backend.all_reduce(tensor, name=name, **options)
        return self._pipeline.all_reduce(mine, name=name)
