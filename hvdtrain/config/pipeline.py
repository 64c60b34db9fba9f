"""Options of pipeline parallelism: how a model is cut into stages, and in which order microbatches pass them."""

from dataclasses import KW_ONLY
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]


@section
class PipelineConfig:
    """How the ranks along the pp axis of --parallel share a model's layers; --accumulate sets the microbatches."""

    _: KW_ONLY
    pipeline_schedule: ScheduleName = "1f1b"
    """Order of forward and backward passes; interleaved: several stages on each rank, and less idle time."""
    virtual_stages: int = 1
    """Stages on each rank, with --pipeline-schedule=interleaved."""
    pipeline_stages: tuple[str, ...] = ()
    """Names of the layers that begin the second stage, the third …; default: stages of equal cost."""

    def __post_init__(self) -> None:
        if self.virtual_stages < 1:
            raise ConfigError(f"{opt('virtual_stages')} must be at least 1. Received: {self.virtual_stages}.")
        if (self.pipeline_schedule == "interleaved") != (self.virtual_stages > 1):
            raise ConfigError(
                f"{opt('pipeline_schedule', 'interleaved')} needs {opt('virtual_stages')} of 2 or more, which no other "
                "schedule takes. "
                f"Received: {opt('pipeline_schedule', self.pipeline_schedule)} "
                f"{opt('virtual_stages', self.virtual_stages)}."
            )
        if len(set(self.pipeline_stages)) != len(self.pipeline_stages):
            raise ConfigError(
                f"{opt('pipeline_stages')} names each layer once. Received: {', '.join(self.pipeline_stages)}."
            )
