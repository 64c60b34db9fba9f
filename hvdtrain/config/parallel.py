"""Options of the mesh: how ranks are laid out on its axes, and how a pipeline is cut and scheduled."""

import re
from collections.abc import Mapping
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


AXES = ("pp", "dp", "cp", "ep", "tp")
"""Pipeline, data, context, expert and tensor parallel; those that exchange most are last, among neighbouring ranks."""
DATA_AXES = ("dp", "ep")
"""Axes along which ranks are given different samples."""
REPLICA_AXES = ("dp", "cp", "ep")
"""Axes along which ranks hold the same model, but for experts and tables, and compute different parts of its loss."""
HOLDER_AXES = ("dp", "cp")
"""Of these, those along which experts and tables are the same, too."""
USER_AXES = ("pp", *REPLICA_AXES)
"""Axes along which the ranks lie that use one weight, in several stages, if replicas do not hold it apart."""
REST = -1
"""Stands for the ranks that the other axes leave."""
_FORM = "such as tp=2,pp=2"


def parse_axes(text: str | Mapping[str, int] | None) -> dict[str, int]:
    """Return the sizes of the axes that `text` names, such as `tp=2,pp=2,dp=-1`; none for None.

    Raises:
        ConfigError: not of this form, an axis twice or unknown, a size that is no positive number, or several that are
            to take the rest.
    """
    pairs = list(text.items()) if isinstance(text, Mapping) else _pairs(text)
    sizes: dict[str, int] = {}
    for axis, size in pairs:
        if axis not in AXES:
            raise ConfigError(f"{opt('parallel')} knows the axes {', '.join(AXES)}. Received: {axis!r}.")
        if axis in sizes:
            raise ConfigError(f"{opt('parallel')} takes each axis once. Received: {axis} twice.")
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"The size of the axis {axis} must be an int. Received: {size!r}.")
        if size < 1 and size != REST:
            raise ConfigError(
                f"{opt('parallel')} needs positive sizes, or -1 for the ranks that are left. Received: {axis}={size}."
            )
        sizes[axis] = size
    if list(sizes.values()).count(REST) > 1:
        raise ConfigError(f"{opt('parallel')} can give the ranks that are left to one axis only. Received: {text}.")
    return sizes


def _pairs(text: str | None) -> list[tuple[str, int]]:
    found = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([a-z]+)\s*=\s*(-?\d+)\s*", part)
        if match is None:
            raise ConfigError(f"{opt('parallel')} takes sizes of axes, {_FORM}. Received: {text!r}.")
        found.append((match[1], int(match[2])))
    return found
