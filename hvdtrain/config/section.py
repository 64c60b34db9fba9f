"""The decorator of option dataclasses."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that rejects unknown keys of a file."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)
