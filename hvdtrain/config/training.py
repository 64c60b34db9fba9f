"""Options of the compiled step, gradient exchange, weight update, and bad-step policy."""

import math
from dataclasses import KW_ONLY
from typing import Literal, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

PrecisionName = Literal["float32", "mixed_float16", "mixed_bfloat16"]


@section
class StepConfig:
    """Options of the forward and backward pass."""

    _: KW_ONLY
    accumulate: int = 1
    """Microbatches per rank and optimizer step; gradients are reduced once."""
    precision: PrecisionName | None = "float32"
    """Compute dtype of layers; mixed policies keep variables, the last layer and the loss in float32."""
    sync_batch_norm: bool = False
    """Compute BatchNormalization statistics over all ranks."""
    jit: bool = False
    """Compile forward and backward pass with XLA. On CPU it made a CNN 0.7x as fast, a transformer 1.2x at best."""
    recompute: bool = False
    """Recompute activations in the backward pass instead of storing them: less memory."""

    def __post_init__(self) -> None:
        if self.accumulate < 1:
            raise ConfigError(f"{opt('accumulate')} must be at least 1. Received: {self.accumulate}.")


@section
class ClippingConfig:
    """Gradient clipping, on the gradient of the global batch."""

    _: KW_ONLY
    clip_norm: float | None = None
    """Bound on the L2 norm of the whole gradient."""
    clip_value: float | None = None
    """Bound on the absolute value of each gradient element."""

    def __post_init__(self) -> None:
        for option, bound in ((opt("clip_norm"), self.clip_norm), (opt("clip_value"), self.clip_value)):
            if bound is not None and not (math.isfinite(bound) and bound > 0):
                raise ConfigError(f"{option} must be a positive number. Received: {bound}.")
        if self.clip_norm is not None and self.clip_value is not None:
            raise ConfigError(
                f"Clip by norm or by value, not both: leave out {opt('clip_norm')} or {opt('clip_value')}."
            )


ZeroStage = Literal[0, 1, 2, 3]


@section
class UpdateConfig:
    """How gradients become new weights; by default all-reduce and the same update everywhere."""

    zero: ZeroStage = 0
    """ZeRO stage; each rank keeps a shard of 1: optimizer state, 2: gradients too, 3: parameters too."""
    zero_prefetch: int = 0
    """With --zero 3: all-gather the parameters of this many layers ahead of the computing one."""
    local_steps: int | None = None
    """Local SGD: average the weights every N local optimizer steps; None: reduce gradients every step."""
    average_slots: bool = False
    """With --local-steps: average the optimizer state along with the weights."""

    def __post_init__(self) -> None:
        if self.zero not in get_args(ZeroStage):
            raise ConfigError(f"{opt('zero')} must be 0, 1, 2 or 3. Received: {self.zero}.")
        if self.zero_prefetch < 0:
            raise ConfigError(f"{opt('zero_prefetch')} must not be negative. Received: {self.zero_prefetch}.")
        if self.zero_prefetch and self.zero != 3:
            raise ConfigError(
                f"{opt('zero_prefetch')} has no effect without {opt('zero', 3)}: leave it out, or set it to 0."
            )
        if self.local_steps is not None and self.local_steps < 1:
            raise ConfigError(f"{opt('local_steps')} must be at least 1. Received: {self.local_steps}.")
        if self.average_slots and self.local_steps is None:
            raise ConfigError(f"{opt('average_slots')} has no effect without {opt('local_steps')}: leave it out.")
        if self.zero and self.local_steps is not None:
            raise ConfigError(
                f"{opt('zero')} needs every rank's gradients in each step: leave out {opt('zero')} or "
                f"{opt('local_steps')}."
            )


ReduceOpName = Literal["average", "sum", "adasum"]
CompressionName = Literal["none", "fp16", "bf16"]
SparseName = Literal["auto", "gather", "dense"]


@section
class ExchangeConfig:
    """Gradient reduction and transport."""

    reduce_op: ReduceOpName = "average"
    """average over the global batch; sum: average x ranks; adasum: scale-invariant, needs MPI and 2^n ranks."""
    compression: CompressionName = "none"
    """Gradient dtype on the wire: 32 bits, or 16 bits summed in 32."""
    sparse_gradients: SparseName = "auto"
    """Embedding gradients: gather rows, or reduce the dense table; auto picks whichever moves fewer bytes."""
    gradient_groups: int = 0
    """Number of groups in which gradients are sent; 0: each as soon as it is computed."""
    predivide: float = 1.0
    """Divide gradients by this before the sum, and by the rest after it."""

    def __post_init__(self) -> None:
        choices = {
            opt("reduce_op"): (self.reduce_op, ReduceOpName),
            opt("compression"): (self.compression, CompressionName),
        }
        for option, (value, names) in choices.items():
            if value not in get_args(names):
                raise ConfigError(f"{option} must be one of {', '.join(get_args(names))}. Received: {value!r}.")
        if self.gradient_groups < 0:
            raise ConfigError(f"{opt('gradient_groups')} must not be negative. Received: {self.gradient_groups}.")
        if not (math.isfinite(self.predivide) and self.predivide > 0):
            raise ConfigError(f"{opt('predivide')} must be a positive number. Received: {self.predivide}.")
        if self.reduce_op == "adasum":
            self._check_adasum()

    def _check_adasum(self) -> None:
        unfit = {
            opt("compression"): self.compression != "none",
            opt("gradient_groups"): self.gradient_groups > 0,
            opt("predivide"): self.predivide != 1.0,
            opt("sparse_gradients", "gather"): self.sparse_gradients == "gather",
        }
        for option, used in unfit.items():
            if used:
                raise ConfigError(
                    f"{opt('reduce_op', 'adasum')} reduces each whole gradient by itself: leave out {option}."
                )


BadStepName = Literal["raise", "skip", "rollback"]
MAX_BAD_STEPS = 10


@section
class BadStepConfig:
    """Policy for bad steps: NaN or infinity in loss or gradient, or a loss spike."""

    _: KW_ONLY
    on_bad_step: BadStepName = "raise"
    """Policy for a step with NaN, infinity or a spike: raise, skip its update on all ranks, or rollback to the newest
    good checkpoint, leaving out the batches since then.
    """
    spike_threshold: float | None = None
    """Treat a loss as a spike if it exceeds the median of the last 64 good steps by this many standard deviations,
    estimated from the median absolute deviation; None: never.
    """
    max_bad_steps: int = MAX_BAD_STEPS
    """Raise after this many consecutive bad steps (skip) or rollbacks (rollback)."""

    def __post_init__(self) -> None:
        bound = self.spike_threshold
        if bound is not None and not (math.isfinite(bound) and bound > 0):
            raise ConfigError(f"{opt('spike_threshold')} must be a positive number. Received: {bound}.")
        if self.max_bad_steps < 1:
            raise ConfigError(f"{opt('max_bad_steps')} must be at least 1. Received: {self.max_bad_steps}.")
        if self.max_bad_steps != MAX_BAD_STEPS and self.on_bad_step == "raise":
            raise ConfigError(f"{opt('max_bad_steps')} has no effect with {opt('on_bad_step', 'raise')}: leave it out.")

    @property
    def guarded(self) -> bool:
        """Whether steps must be checked before their update is applied."""
        return self.on_bad_step != "raise" or self.spike_threshold is not None


DESYNC_EVERY = 100
"""Default interval in steps. One check reads the state once (0.05 s per 200 MB) and exchanges 8 bytes."""


@section
class DesyncConfig:
    """How often to check that replicas have not diverged."""

    _: KW_ONLY
    desync_every: int = DESYNC_EVERY
    """Compare a hash of weights and optimizer state across ranks every N steps, after the first steps, and at the end
    of every epoch; 0: never.
    """

    def __post_init__(self) -> None:
        if self.desync_every < 0:
            raise ConfigError(f"{opt('desync_every')} must be at least 0. Received: {self.desync_every}.")


@section
class TrainingConfig(StepConfig):
    """Length and seed of training."""

    epochs: int = 10
    """Passes over the training samples."""
    max_steps: int | None = None
    """Stop after this many optimizer steps, even within an epoch."""
    steps_per_epoch: int | None = None
    """Steps per epoch, for infinite data of --data PACKAGE.MODULE:FUNCTION."""
    validation_steps: int | None = None
    """Batches per evaluation, for infinite validation data of --data PACKAGE.MODULE:FUNCTION."""
    seed: int = 0
    """Seed of initial weights, sample order and dropout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epochs < 1:
            raise ConfigError(f"{opt('epochs')} must be at least 1. Received: {self.epochs}.")
        for name in ("max_steps", "steps_per_epoch", "validation_steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{opt(name)} must be at least 1. Received: {value}.")
        if not 0 <= self.seed < 2**31:
            raise ConfigError(f"{opt('seed')} must lie in [0, 2^31). Received: {self.seed}.")
