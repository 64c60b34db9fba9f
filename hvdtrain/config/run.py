"""The whole configuration of a run."""

from dataclasses import field

from hvdtrain.config.checkpoint import CheckpointConfig
from hvdtrain.config.data import DataConfig
from hvdtrain.config.exchange import ExchangeConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.observability import ObservabilityConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.config.section import section
from hvdtrain.config.training import TrainingConfig


@section
class Config:
    """Everything that determines a run; leaf names are unique, so that each is one flat flag."""

    recipe: str
    """Name of the recipe: the first word of the command line."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    exchange: ExchangeConfig = field(default_factory=ExchangeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
