"""The decorator of every group of options."""

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass that refuses unknown keys when it is read from a file."""
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)
