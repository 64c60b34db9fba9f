"""What every update rule offers, and what a rule that keeps whole, equal slots on every replica needs no more than."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.optim.averaging import averaged_weights
from hvdtrain.optim.precision import has_dynamic_scale, loss_scale_of
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.slots import extend_optimizer, replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.forward_backward import LocalGradients
from hvdtrain.training.step.guard import StepGuard
from hvdtrain.training.step.parameters import Parameters
from hvdtrain.training.step.result import Totals


class UpdateRule:
    """Turns one replica's gradients into new weights; owns the exchange, the optimizer and its slots.

    Args:
        backend: the replicas.
        model: the built model whose trainable variables are updated.
        optimizer: a Keras optimizer; the rule builds it.
        options: of the step; a rule reads those that concern it.
    """

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        options = options or StepOptions()
        self.model = model
        self.optimizer = optimizer
        self._backend = backend
        self._clipping = options.clipping
        if options.guarded:
            self.guard = StepGuard(options, scaled=has_dynamic_scale(optimizer))
        self._variables = list(model.trainable_variables)
        self._paths = list(structure_of(model).by_path(self._variables))
        self._build_optimizer()

    guard: StepGuard | None = None
    """Holds back the update of a bad step; None where all are applied."""
    weights_agree = True
    """Whether every replica holds the same weights after each step."""

    @classmethod
    def variant(cls, options: StepOptions) -> "type[UpdateRule]":
        """Return the class that `options` choose, where one option chooses among several rules."""
        return cls

    @classmethod
    def check(cls, options: StepOptions, optimizer: Any) -> None:
        """Refuse options and optimizers that the rule cannot work with; done before anything is built.

        Raises:
            ConfigError: naming the option.
        """

    @classmethod
    def check_axes(cls, axes: Mapping[str, int]) -> None:
        """Refuse axes of the mesh along which the rule cannot have a model split.

        Args:
            axes: sizes of those that hold several ranks.

        Raises:
            ConfigError: naming them.
        """

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Take one optimizer step, inside the compiled step.

        Args:
            local: this replica's gradients and totals.
            measure: whether the gradient's norm is wanted, which costs a pass.

        Returns:
            [3], `LocalGradients.totals` over all replicas (see `reported`), with a guard its `GuardedTotals`; and the
            global L2 norm of the unscaled gradient before clipping, or None.
        """
        raise NotImplementedError

    def reported(self, totals: tf.Tensor) -> Totals:
        """Return a step's totals for the loop; a rule whose `update` leaves them local reduces them when read."""
        return totals

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """Return what the passes read and take gradients of; made for each compiled step.

        Args:
            trainable: the variables that these passes train, by structural path.
        """
        return Parameters(trainable)

    def finite_parameters(self, state: TrainState) -> tf.Tensor:
        """Return whether all trainable parameters are finite, the same on every replica; within the compiled step."""
        return tf.math.is_finite(zero_if_finite([v.read_value() for v in state.trainable.values()]))

    def apart(self) -> dict[str, float]:
        """Return, by path, the weights whose gradients differ by more than rounding on ranks with the same samples.

        As the last measured step found them, with their deviations; see `AlikeGradients.apart`.
        """
        return {}

    def begin_step(self) -> None:
        """Prepare for a step, before the compiled function is called."""

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the optimizer's slots and the rule's own tensors by path, with their place in the whole."""
        return replicated_slots(self.optimizer, structure_of(self.model))

    def follow_model(self, *, training: bool = True) -> None:
        """Train what is trainable by now, after layers were frozen or unfrozen; known slots keep their values.

        Args:
            training: whether it is about to be trained, and not evaluated alone.
        """
        self._variables = list(self.model.trainable_variables)
        self._paths = list(structure_of(self.model).by_path(self._variables))
        self._build_optimizer()

    def adopt_weights(self) -> None:
        """Take over weights of the model that were set from outside the step, as by a callback."""

    def begin(self) -> None:
        """Go on from the state as it is, the same on every replica: it was restored or broadcast."""
        self.adopt_weights()

    def show_weights(self) -> None:
        """Let the model hold its weights for code that looks at them between two steps; every replica calls it."""

    @property
    def holds_weights(self) -> bool:
        """Whether the model holds its weights now; else they are read in the context of `gathered_weights`."""
        return True

    def gathered_weights(self) -> AbstractContextManager[None]:
        """Context within a compiled function without gradients, in which the model's variables read as its weights."""
        return nullcontext()

    def prepare_to_evaluate(self) -> None:
        """Make the model what is evaluated, in the context of `gathered_weights`; every replica calls it."""
        self.consolidate()

    def consolidate(self) -> None:
        """Make model and slots what is evaluated; every replica calls it, outside the compiled step."""

    def prepare_to_save(self) -> None:
        """Make `named_tensors` what is saved; every replica calls it, outside the compiled step."""
        self.consolidate()

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Give the model the optimizer's averages of its weights (`use_ema=True`) inside the context."""
        return averaged_weights(self.optimizer, self.model)

    def _unless_bad(self, totals: tf.Tensor, update: Callable[[], None]) -> tf.Tensor:
        """Call `update`, unless a guard finds the step bad, and return its totals."""
        if self.guard is not None:
            return self.guard.unless_bad(totals, update)
        update()
        return totals

    def _build_optimizer(self) -> None:
        # Keras' LossScaleOptimizer would make its scale anew, and a loaded one has its state already.
        if not self.optimizer.built:
            self.optimizer.build(self._variables)
        extend_optimizer(self.optimizer, self._variables, structure_of(self.model))

    def _clipped(
        self, gradients: Sequence[Gradient], norm: tf.Tensor | None
    ) -> tuple[list[Gradient], tf.Tensor | None]:
        """Return the gradients within their bounds, and the norm that they had without the loss scale."""
        # What a LossScaleOptimizer is given is scaled still; its bounds are scaled instead.
        scale = loss_scale_of(self.optimizer)
        clipped = self._clipping.apply(gradients, norm, scale)
        return clipped, None if norm is None else norm / tf.cast(scale, norm.dtype)
