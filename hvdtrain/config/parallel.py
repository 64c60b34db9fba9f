"""Options of the device mesh and of pipeline parallelism."""

import re
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.options import applies_to, needs, option, section

ScheduleName = Literal["gpipe", "1f1b", "interleaved"]


def _once_each(layers: tuple[str, ...]) -> None:
    if len(set(layers)) != len(layers):
        raise ConfigError(f"{opt('pipeline_stages')} names each layer once. Received: {', '.join(layers)}.")


@section
class PipelineConfig:
    """Pipeline parallelism along the pp axis of --parallel; --accumulate sets the microbatches."""

    _: KW_ONLY
    pipeline_schedule: ScheduleName = option(
        "1f1b",
        needs("virtual_stages", when="interleaved", instead="add 2 or more"),
        applies_to("pp", note=True),
    )
    """Order of forward and backward passes; interleaved: several stages per rank, smaller bubble."""
    virtual_stages: int = option(
        1, "[1, inf)", applies_to("pipeline_schedule=interleaved"), applies_to("pp", note=True)
    )
    """Stages per rank, with --pipeline-schedule=interleaved."""
    pipeline_stages: tuple[str, ...] = option((), applies_to("pp", note=True), valid=_once_each)
    """Names of the layers that begin the second stage, the third …; default: balance the cost."""


AXES = ("pp", "dp", "cp", "ep", "tp")
"""Pipeline, data, context, expert and tensor parallel, from outermost to innermost: the axes that communicate most
connect neighbouring ranks.
"""
DATA_AXES = ("dp", "ep")
"""Axes along which ranks have different samples."""
REPLICA_AXES = ("dp", "cp", "ep")
"""Axes along which non-expert weights are replicated and ranks compute different terms of the loss."""
HOLDER_AXES = ("dp", "cp")
"""Axes along which experts and sharded tables are replicated, too."""
USER_AXES = ("pp", *REPLICA_AXES)
"""Axes along which a weight may be shared between ranks: pipeline stages and replicas."""
REST = -1
"""Placeholder for the ranks that the other axes leave."""
_FORM = "such as tp=2,pp=2"


def parse_axes(text: str | Mapping[str, int] | None) -> dict[str, int]:
    """Parse axis sizes such as `tp=2,pp=2,dp=-1`; empty for None.

    Raises ConfigError for bad syntax, an unknown or repeated axis, a size below 1, or more than one -1.
    """
    name = "mesh" if isinstance(text, Mapping) else opt("parallel")
    pairs = list(text.items()) if isinstance(text, Mapping) else _pairs(text)
    sizes: dict[str, int] = {}
    for axis, size in pairs:
        if axis not in AXES:
            raise ConfigError(f"{name} knows the axes {', '.join(AXES)}. Received: {axis!r}.")
        if axis in sizes:
            raise ConfigError(f"{name} takes each axis once. Received: {axis} twice.")
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"The size of the axis {axis} must be an int. Received: {size!r}.")
        if size < 1 and size != REST:
            raise ConfigError(
                f"{name} needs positive sizes, or -1 for the ranks that are left. Received: {axis}={size}."
            )
        sizes[axis] = size
    if list(sizes.values()).count(REST) > 1:
        raise ConfigError(f"{name} can give the ranks that are left to one axis only. Received: {text}.")
    return sizes


def _pairs(text: str | None) -> list[tuple[str, int]]:
    found = []
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*([a-z]+)\s*=\s*(-?\d+)\s*", part)
        if match is None:
            raise ConfigError(f"{opt('parallel')} takes sizes of axes, {_FORM}. Received: {text!r}.")
        found.append((match[1], int(match[2])))
    return found
