"""Base of update rules, with replicated optimizer state."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.optim.averaging import averaged_weights, averages_weights
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import extend_optimizer, replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import CompiledStep, LocalGradients, Parameters, Totals
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.guard import StepGuard
from hvdtrain.training.step.loss_terms import Divisors


class UpdateRule:
    """Turns one replica's gradients into new weights; owns reduction, optimizer and its state.

    The rule builds the optimizer.
    """

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        options = options or StepOptions()
        self.model = model
        self.optimizer = optimizer
        self._backend = backend
        self._clipping = options.clipping
        if options.guarded:
            self.guard = StepGuard(options, scaled=has_dynamic_scale(optimizer))
        self._follow_variables()

    guard: StepGuard | None = None
    """Skips the update of a bad step; None: all updates are applied."""
    weights_agree = True
    """Whether all replicas hold the same weights and optimizer state after each step."""
    divisors: Divisors = "exchanged"
    """What becomes of divisors of losses; unless they are exchanged, each replica takes steps of its own."""
    trainers: int | None = None
    """Number of the replicas that train, the first ones; None: all."""
    figures: Mapping[str, Any] = {}
    """Counts of the last training, for its summary."""
    acts_between_steps = False
    """Whether `stepping` does something after each step, which cannot be compiled together with the next one."""
    waits_when_measured = False
    """Whether replicas that go on at their own pace wait for one another in a measured step."""

    @property
    def updates_rows(self) -> bool:
        """Whether rows of tables are updated alone, of which lookups need not read the others."""
        return False

    @property
    def slices(self) -> int:
        """Number of slices that a batch is cut into."""
        return self.trainers or self._backend.data_parallel.size

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Take one optimizer step, inside the compiled step. Collective.

        Returns the global `LocalGradients.totals` [3] (or local ones, see `reported`), with a guard its
        `GuardedTotals`; and the global L2 norm of the unscaled gradient before clipping, which costs a pass and is None
        unless `measure`.
        """
        raise NotImplementedError

    def reported(self, totals: tf.Tensor) -> Totals:
        """Return a step's totals for the loop; a rule with local totals reduces them when read."""
        return totals

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """Return the variables that a step reads and differentiates for `trainable`."""
        return Parameters(trainable)

    def finite_parameters(self, state: TrainState) -> tf.Tensor:
        """Return whether all trainable parameters are finite, in the compiled step. Collective."""
        return tf.math.is_finite(zero_if_finite([tf.convert_to_tensor(v) for v in state.trainable.values()]))

    def diverging_gradients(self) -> dict[str, float]:
        """Return gradients that should be identical across tp ranks but are not.

        By path, with their deviations in the last measured step.
        """
        return {}

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Context of a step, around the call of the compiled function."""
        yield

    def paced(self, step: CompiledStep, data: TrainingData, state: TrainState) -> tuple[CompiledStep, TrainingData]:
        """Return the step and the data of a training, which decide what this replica trains on, and when."""
        return step, data

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return optimizer state and own tensors by path, with their shards."""
        return replicated_slots(self.optimizer, self._structure)

    def follow_model(self, *, training: bool = True) -> None:
        """Train the currently trainable variables, keeping known slots; `training` unless only evaluated."""
        self._follow_variables()

    def _follow_variables(self) -> None:
        self._structure = structure_of(self.model)
        self._variables = list(self.model.trainable_variables)
        self._paths = list(self._structure.by_path(self._variables))
        self._build_optimizer()

    def sync_from_model(self) -> None:
        """Copy weights that user code changed into the rule's own copies."""

    def on_state_loaded(self, own: Mapping[str, np.ndarray] | None = None) -> None:
        """Called after the state was restored or broadcast.

        Args:
            own: what a restored checkpoint has below `RULE`, by path; nothing if another rule has written it.
        """
        self.sync_from_model()

    def gather_weights(self) -> None:
        """Make the model hold full weights for code between two steps. Collective."""

    @contextmanager
    def shown_weights(self) -> Iterator[None]:
        """Context of user code between two steps, which sees full weights, and may set them. Collective."""
        self.gather_weights()
        yield
        self.sync_from_model()

    def gathering(self) -> AbstractContextManager[None] | None:
        """Return a context in a compiled function, without gradients, where variables are full; None if they are."""
        return None

    def prepare_to_evaluate(self) -> None:
        """Prepare the model for evaluation within `gathering`. Collective."""
        self.consolidate()

    def consolidate(self) -> None:
        """Make model and optimizer state globally consistent, outside the compiled step. Collective."""

    def prepare_to_save(self) -> None:
        """Prepare `named_tensors` for saving, outside the compiled step. Collective."""
        self.consolidate()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Swap in the EMA of the weights (`use_ema=True`) inside the context."""
        return averaged_weights(self.optimizer, self.model)

    def finalize(self) -> None:
        """Replace the weights by their EMA, if any, as Keras does after a training. Collective."""
        if not averages_weights(self.optimizer):
            return
        self.gather_weights()
        self.consolidate()
        with self.averaged_weights():
            values = [tf.identity(variable.value) for variable in self.model.trainable_variables]
        for variable, value in zip(self.model.trainable_variables, values, strict=True):
            variable.assign(value)
        self.sync_from_model()

    def give_back(self, *, whole: bool) -> None:
        """Let an optimizer that was built for the rule's own variables be the model's, with slots if `whole`.

        Collective.
        """

    def _unless_bad(self, totals: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Call `update`, unless a guard finds the step bad; return its totals."""
        if self.guard is not None:
            return self.guard.unless_bad(totals, update)
        update()
        return totals

    def _build_optimizer(self) -> None:
        # A built LossScaleOptimizer would recreate its scale, and a loaded one has its state already.
        if not self.optimizer.built:
            self.optimizer.build(self._variables)
        extend_optimizer(self.optimizer, self._variables, self._structure)

    def _clipped(
        self, gradients: Sequence[Gradient], norm: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return the clipped gradients, and the norm without the loss scale."""
        # Gradients for a LossScaleOptimizer are still scaled, so the bounds are scaled instead.
        scale = loss_scale_of(self.optimizer)
        clipped = self._clipping.apply(gradients, norm, scale)
        return clipped, None if norm is None else norm / tf.cast(scale, norm.dtype)
