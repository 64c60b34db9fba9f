"""The plan of a comparison: what runs, in which order; pure functions."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.bench.catalog import bench_model
from hvdtrain.bench.sides import IDEAL, refusal, side
from hvdtrain.config.errors import ConfigError

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Point:
    """One point of the comparison: a side with one setting."""

    side: str
    model: str
    ranks: int
    batch: int
    """Samples per optimizer step over all ranks."""
    precision: str = "float32"
    accumulate: int = 1

    @property
    def microbatch(self) -> int:
        """Samples in one forward pass of a rank."""
        return self.batch // self.ranks // self.accumulate

    @property
    def setting(self) -> "Point":
        """The point without its side: points with equal settings are compared."""
        return replace(self, side="")


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The combinations to measure."""

    sides: Sequence[str]
    models: Sequence[str]
    ranks: Sequence[int]
    precisions: Sequence[str] = ("float32",)
    accumulations: Sequence[int] = (1,)
    scalings: Sequence[Scaling] = ("strong", "weak")
    batch: int | None = None
    """Global batch in place of the models' own."""


def points(matrix: Matrix) -> tuple[list[Point], dict[Point, str]]:
    """Return the points to run, without duplicates, and the impossible ones with the reason.

    Let B be a model's batch, n a number of ranks, N the largest one, K the accumulation. A step takes K B samples in
    strong scaling, and K n B / N in weak scaling: at n = N the two are one run. The ideal, one process on one rank's
    cores, takes what a step takes, for strong scaling, and what a rank takes, for weak scaling, at K = 1.

    Raises:
        ConfigError: an unknown name, or a batch that does not divide among the ranks.
    """
    run: dict[Point, None] = {}
    refused: dict[Point, str] = {}
    for setting in _settings(matrix):
        for ideal in _ideals(setting, matrix.scalings):
            _sort_in(ideal, run, refused)
        for name in matrix.sides:
            if name != IDEAL:
                _sort_in(replace(setting, side=name), run, refused)
    return sorted(run, key=lambda point: _group_number(point, list(run))), refused


def _sort_in(point: Point, run: dict[Point, None], refused: dict[Point, str]) -> None:
    reason = refusal(point.side, ranks=point.ranks, precision=point.precision, accumulate=point.accumulate)
    if reason is None:
        run[point] = None
    else:
        refused[point] = reason


def _settings(matrix: Matrix) -> Iterator[Point]:
    for name in matrix.sides:
        side(name)  # a wrong name is refused before anything runs
    largest = max(matrix.ranks)
    everything = itertools.product(
        matrix.models, matrix.precisions, matrix.accumulations, matrix.ranks, matrix.scalings
    )
    for model, precision, count, ranks, scaling in everything:
        batch = matrix.batch or bench_model(model).config.data.batch
        for number in (largest, ranks):
            if batch % number:
                raise ConfigError(
                    f"A batch of {batch} samples ({model}) does not divide among {number} ranks. Use --batch or other "
                    "--ranks."
                )
        share = batch if scaling == "strong" else batch // largest * ranks
        yield Point(side="", model=model, ranks=ranks, batch=share * count, precision=precision, accumulate=count)


def _ideals(setting: Point, scalings: Sequence[Scaling]) -> Iterator[Point]:
    """Return the single-process points that the efficiencies of `setting` need."""
    whole = setting.batch // setting.accumulate
    for scaling in scalings:
        batch = whole if scaling == "strong" else whole // setting.ranks
        yield Point(side=IDEAL, model=setting.model, ranks=1, batch=batch, precision=setting.precision)


def _group(point: Point) -> tuple[str, str]:
    return point.model, point.precision


def _group_number(point: Point, everything: list[Point]) -> int:
    return list(dict.fromkeys(map(_group, everything))).index(_group(point))


def turns(todo: Sequence[Point], rounds: int) -> Iterator[tuple[int, Point]]:
    """Return (round, point) in the order of measuring.

    All sides of a model and precision take turns, A B C then C B A, so that compared sides run close together, and a
    machine that slows down favours none.
    """
    groups = list(dict.fromkeys(map(_group, todo)))
    for group in groups:
        members = [point for point in todo if _group(point) == group]
        for number in range(rounds):
            for point in members if number % 2 == 0 else reversed(members):
                yield number, point
