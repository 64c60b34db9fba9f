"""How the ranks of a job are laid out on the axes of a mesh."""

import re
from collections.abc import Mapping

from hvdtrain.config.errors import ConfigError, opt

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
