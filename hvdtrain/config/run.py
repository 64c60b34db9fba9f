"""The full configuration of a run."""

from dataclasses import field, fields, replace
from typing import Any

from hvdtrain.config.checkpoint import CheckpointConfig
from hvdtrain.config.data import DataConfig
from hvdtrain.config.facts import Facts
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.observability import ObservabilityConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.options import check, section
from hvdtrain.config.parallel import PipelineConfig, parse_axes
from hvdtrain.config.runtime import ElasticConfig, RuntimeConfig
from hvdtrain.config.training import BadStepConfig, DesyncConfig, ExchangeConfig, TrainingConfig, UpdateConfig
from hvdtrain.config.tuning import TuningConfig


@section
class Config:
    """A run's full configuration. Leaf names are unique, so that flags are flat."""

    recipe: str
    """Name of the recipe: the first word of the command line."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    bad_steps: BadStepConfig = field(default_factory=BadStepConfig)
    desync: DesyncConfig = field(default_factory=DesyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    elastic: ElasticConfig = field(default_factory=ElasticConfig)

    def __post_init__(self) -> None:
        """Check combinations across sections, with the axes that `--parallel` names."""
        axes = parse_axes(self.runtime.parallel)
        check(self, facts=Facts.on_mesh(axes) if axes else Facts())

    @property
    def processes(self) -> RuntimeConfig:
        """Runtime options; others imply the mesh unless `--parallel` is given."""
        if self.runtime.parallel or self.model.embedding_sharding == "none":
            return self.runtime
        return replace(self.runtime, parallel="ep=-1")


def option_fields(config: type = Config) -> dict[str, Any]:
    """Return the dataclass field of each option by its name, which is unique."""
    found: dict[str, Any] = {}
    for each in fields(config):
        factory: Any = each.default_factory
        if "declaration" in each.metadata:
            found[each.name] = each
        elif isinstance(factory, type):
            found |= option_fields(factory)
    return found


NAMED_WITH_ARGUMENTS = (
    ("model", "model", "model_args"),
    ("data", "data", "data_args"),
    ("optim", "optimizer", "optimizer_args"),
)
"""(section, option, arguments) of each configurable component."""


def without_foreign_arguments(base: Config, chosen: Config) -> Config:
    """Drop arguments in `base` of components that `chosen` replaces."""
    for part, name, arguments in NAMED_WITH_ARGUMENTS:
        old = getattr(base, part)
        if getattr(old, name) != getattr(getattr(chosen, part), name):
            base = replace(base, **{part: replace(old, **{arguments: {}})})
    return base
