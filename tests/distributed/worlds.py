"""Where a distributed check runs: a decorator at the check, which is read without importing the check's file."""

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKS = Path(__file__).with_name("checks")


@dataclass(frozen=True)
class Launch:
    """How a world's ranks are started."""

    controller: str
    size: int
    backend: str = "auto"
    environ: Mapping[str, str] = field(default_factory=dict)


WORLDS = {
    **{f"{controller}-{size}": Launch(controller, size) for size in (1, 2, 4, 8) for controller in ("gloo", "mpirun")},
    "mirrored": Launch("none", 1, "mirrored"),
    "multi_worker_mirrored": Launch("mpirun", 2, "multi_worker_mirrored"),
    "parameter_server": Launch("mpirun", 4, "parameter_server"),
    "tf_keras": Launch("mpirun", 2, environ={"TF_USE_LEGACY_KERAS": "1"}),
}
DEFAULT = "mpirun-2"
"""The world of a check without a decorator."""


def worlds(*names: str, extended: bool = False, why: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated check in these worlds, in place of `mpirun-2` alone.

    Decorators add up. With `extended`, only `launch/test.sh --all` runs the check in these worlds. `why` is the reason
    for a choice that is not obvious. The arguments must be literals: `read_checks` reads them from the source.
    """
    del names, extended, why
    return lambda check: check


@dataclass(frozen=True)
class Check:
    """A check, by `file.function`, and whether it is extended in each of its worlds."""

    name: str
    extended: Mapping[str, bool]


def read_checks(file: Path) -> Iterator[Check]:
    """Yield a file's checks in their order.

    Raises:
        ValueError: A decorator names no world, an unknown one or one twice, or its arguments are not literals.
    """
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("check_"):
            try:
                yield Check(f"{file.stem}.{node.name}", _worlds_of(node))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{file}:{node.lineno}: {node.name}: {error}") from error


def _worlds_of(check: ast.FunctionDef) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for decorator in check.decorator_list:
        if "worlds" not in ast.unparse(decorator):
            continue
        if not (isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "worlds"):
            raise ValueError(f"use worlds(…), called by this name. Received: {ast.unparse(decorator)}")
        names = [ast.literal_eval(argument) for argument in decorator.args]
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in decorator.keywords}
        worlds(*names, **options)  # a TypeError for unknown options
        if not names:
            raise ValueError("worlds(…) names no world")
        for name in names:
            if name not in WORLDS:
                raise ValueError(f"unknown world {name!r}. Known: {', '.join(WORLDS)}")
            if name in found:
                raise ValueError(f"the world {name!r} is named twice")
            found[name] = options.get("extended", False)
    return found or {DEFAULT: False}


def all_checks() -> list[Check]:
    return [check for file in sorted(CHECKS.glob("*.py")) for check in read_checks(file)]
