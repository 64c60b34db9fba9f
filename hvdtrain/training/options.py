"""Options of the training step, named like the command-line flags."""

from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from pydantic import TypeAdapter, ValidationError

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import PipelineConfig, ScheduleName
from hvdtrain.config.registry import suggestion
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.config.training import (
    BadStepConfig,
    BadStepName,
    BitsName,
    ClippingConfig,
    CompensationName,
    CompressionName,
    DesyncConfig,
    ExchangeConfig,
    GraphName,
    OuterName,
    PrecisionName,
    ReduceOpName,
    SparseName,
    StepConfig,
    UpdateConfig,
    UpdateName,
    ZeroStage,
)
from hvdtrain.gradients.reduction import ReductionOptions
from hvdtrain.optim.clipping import Clipping

OF_INIT = frozenset(field.name for field in fields(RuntimeConfig))
"""Options of `init`."""


@dataclass(frozen=True, kw_only=True)
class StepOptions(
    DesyncConfig, BadStepConfig, PipelineConfig, UpdateConfig, ExchangeConfig, ClippingConfig, StepConfig
):
    """Options of the training step, from several sections of the configuration."""

    precision: PrecisionName | None = None
    """Dtype policy for building the model; None: Keras' current one."""

    def chosen(self) -> dict[str, Any]:
        """Return the options with other values than the default, by name."""
        plain = StepOptions(precision="float32" if self.precision == "float32" else None)
        return {name: value for name, value in vars(self).items() if value != getattr(plain, name)}

    @property
    def clipping(self) -> Clipping:
        """Gradient clipping."""
        return Clipping(self.clip_norm, self.clip_value)

    def reduction_on(self, backend: Backend) -> ReductionOptions:
        """Return the reduction options on `backend`."""
        options = ReductionOptions(**{option.name: getattr(self, option.name) for option in fields(ExchangeConfig)})
        if not backend.capabilities.sends_together:
            return options
        sparse: SparseName = "dense" if self.sparse_gradients == "dense" else "gather"
        return replace(options, gradient_groups=1, sparse_gradients=sparse)


class TrainerOptions(TypedDict, total=False):
    """The fields of `StepOptions` as keyword arguments, for editors (PEP 692)."""

    accumulate: int
    steps_per_execution: int
    precision: PrecisionName | None
    sync_batch_norm: bool
    jit: bool
    whole_batch: bool
    explain_step: bool
    recompute: bool
    clip_norm: float | None
    clip_value: float | None
    reduce_op: ReduceOpName
    compression: CompressionName
    sparse_gradients: SparseName
    gradient_groups: int
    predivide: float
    update: UpdateName
    servers: int
    server_variables: tuple[str, ...]
    gossip_graph: GraphName
    push_sum: bool
    elasticity: float | None
    max_staleness: int | None
    compensation: CompensationName
    dc_strength: float | None
    pull_ahead: bool
    record: str | None
    replay: str | None
    zero: ZeroStage
    zero_prefetch: int
    local_steps: int | None
    local_after: int
    average_slots: bool
    outer_optimizer: OuterName
    outer_learning_rate: float | None
    outer_momentum: float | None
    average_fragments: int
    average_delay: int
    average_blend: float | None
    average_bits: BitsName
    pipeline_schedule: ScheduleName
    virtual_stages: int
    pipeline_stages: tuple[str, ...]
    on_bad_step: BadStepName
    spike_threshold: float | None
    max_bad_steps: int
    desync_every: int


_ARGUMENTS = ("model", "optimizer", "loss", "metrics", "loss_weights", "weighted_metrics", "seed", "backend")
"""Those of `Trainer` beside the options."""
_OF_FIT = " It is an argument of fit()."
_OF_OPTIMIZER = " It is the optimizer's: Trainer(model, keras.optimizers.SGD(0.1), loss)."
_ELSEWHERE = {
    **{"jit_compile": " Perhaps you meant: jit.", "lr": _OF_OPTIMIZER, "learning_rate": _OF_OPTIMIZER},
    **dict.fromkeys(("batch", "batch_size", "callbacks", "epochs", "validation_data", "verbose"), _OF_FIT),
}
"""What users write for an option of something else."""


def step_options(given: dict[str, Any]) -> StepOptions:
    """Return StepOptions from keyword arguments.

    Raises ConfigError for an unknown name, an invalid value, or options that exclude one another.
    """
    known = {field.name: "" for field in fields(StepOptions)}
    near = known | dict.fromkeys(_ARGUMENTS, "")
    for name in given:
        if name not in known:
            advice = _ELSEWHERE.get(name) or (" It is one of hvdtrain.init()." if name in OF_INIT else "")
            advice = advice or suggestion(name, near)
            raise ConfigError(f"Trainer takes no option {name!r}.{advice}")
    try:
        return TypeAdapter(StepOptions).validate_python(given)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(detail) for detail in error.errors())) from error


def _line(detail: Any) -> str:
    name = ".".join(str(key) for key in detail["loc"])
    cause = detail.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return cause.message
    problem = f": {detail['msg']}".replace(": Input should", " should")
    return f"{name}{problem}. Received: {detail['input']!r}."
