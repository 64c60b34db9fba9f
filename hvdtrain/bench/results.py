"""Results of benchmarks: schema, results.json, the folder of a day, the machine, statistics. No TensorFlow."""

import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.options import section
from hvdtrain.runtime.diagnosis.machine import first_line
from hvdtrain.runtime.report import collect_environment, nvidia_gpus

FILE = "results.json"
LEAST_ROUNDS = 3
WIDEST = 0.10
"""Interquartile range of a ratio, relative to its median, beyond which it is not reported."""
MOST_FOREIGN = 0.25
"""Cores that other programs may keep busy meanwhile, in the median over the rounds."""
NOTHING = "-"
Figure = float | list[float] | dict[str, float | list[float]] | None


@section
class Round:
    """One launch of a run."""

    _: KW_ONLY
    figures: dict[str, Figure]
    """By name: a number, one for each window or process, or some by name; None if it does not apply."""
    foreign_cores: float
    """Cores that other programs kept busy during the launch."""


@section
class Run:
    """A side of a comparison, with one setting: all launches of its command."""

    _: KW_ONLY
    name: str
    setting: dict[str, Any] = field(default_factory=dict)
    """Model, ranks, batch …; runs with equal settings are compared."""
    command: str
    """Repeats one launch."""
    rounds: list[Round] = field(default_factory=list)
    skipped: str | None = None
    """Why it was not measured, or not completely."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Reported by its processes: threads, cores, environment variables, parameters."""

    def figure(self, name: str) -> list[Any]:
        """Return a figure of all rounds, where it applies."""
        known = (one.figures.get(name) for one in self.rounds)
        return [value for value in known if value is not None]

    def medians(self, name: str) -> list[float]:
        """Return a figure of all rounds; of several numbers their median."""
        return [float(np.median(value)) for value in self.figure(name)]


@section
class Comparison:
    """Runs that took turns."""

    command: str
    options: dict[str, Any]
    runs: list[Run]


@section
class Results:
    """The contents of results.json."""

    _: KW_ONLY
    date: str
    host_class: str
    environment: dict[str, Any]
    """Versions, machine, environment variables, as in `python -m hvdtrain env`."""
    format: Literal[2] = 2
    comparisons: dict[str, Comparison] = field(default_factory=dict)
    """By kind: suite, collectives, parallel, autotune, or the name of a script."""


def new_results() -> Results:
    """Return results of this machine, without any comparison yet."""
    facts = environment()
    return Results(date=time.strftime("%Y-%m-%d"), host_class=host_class(facts), environment=facts)


def write_results(results: Results, file: Path) -> None:
    """Validate `results` and write them to `file` atomically."""
    from hvdtrain.observability.summary import json_safe, write_json

    values = json_safe(asdict(results))
    parsed(values, str(file))
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, values)


def read_results(path: Path) -> Results:
    """Read results from `path`, a folder or its results.json.

    Raises:
        ConfigError: it does not exist, or does not match the schema.
    """
    file = path / FILE if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The results {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"The results {file} are not JSON: {error}.") from error
    return parsed(values, str(file))


def parsed(values: Any, origin: str) -> Results:
    """Validate `values` as results.

    Raises:
        ConfigError: names each path that does not match the schema.
    """
    import pydantic

    try:
        return pydantic.TypeAdapter(Results).validate_python(values)
    except pydantic.ValidationError as error:
        places = [f"  {'.'.join(map(str, detail['loc'])) or 'all'}: {detail['msg']}" for detail in error.errors()]
        raise ConfigError(f"{origin} are not results of bench:\n" + "\n".join(places[:10])) from error


class Folder:
    """The results folder of a day, which comparisons of different kinds share.

    Earlier results are never overwritten: a second comparison of a kind on a day gets a new folder.

    Args:
        parent: the folder to create it in.
        kind: of the comparison.
    """

    def __init__(self, parent: Path, kind: str) -> None:
        self.results = new_results()
        self._kind = kind
        number = 1
        while True:
            name = f"{self.results.date}-{self.results.host_class}" + f"-{number}" * (number > 1)
            self.path = parent / name
            if not os.path.lexists(self.path):
                break
            if (self.path / FILE).exists() and kind not in read_results(self.path).comparisons:
                self.results = read_results(self.path)
                break
            number += 1

    def keep(self, comparison: Comparison) -> None:
        """Write the results so far."""
        comparisons = {**self.results.comparisons, self._kind: comparison}
        self.results = replace(self.results, comparisons=comparisons)
        write_results(self.results, self.path / FILE)


def environment() -> dict[str, Any]:
    """Return versions, machine, GPUs, MPI and environment variables."""
    mpirun = shutil.which("mpirun")
    facts = {"gpus": nvidia_gpus(), "mpi": {"mpirun": first_line([mpirun, "--version"]) if mpirun else None}}
    found = collect_environment() | facts
    # Reports may be published: leave out personal paths.
    del found["python"]["executable"]
    return found


def host_class(facts: Mapping[str, Any]) -> str:
    """Return the class of the machine, as part of a folder name: 2-cores, 16-cores-1-nvidia-h200."""
    name = f"{facts['machine']['usable_cores']}-cores"
    gpus: Sequence[str] = facts["gpus"]
    if gpus:
        model = re.sub(r"[^a-z0-9]+", "-", gpus[0].split(",")[0].lower()).strip("-")
        name += f"-{len(gpus)}-{model}"
    return name


# -- statistics over rounds --


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles (linear between the values)."""

    low: float
    median: float
    high: float

    @property
    def width(self) -> float:
        """Interquartile range relative to the median."""
        return (self.high - self.low) / self.median if self.median else float("inf")


@dataclass(frozen=True)
class Refused:
    """A ratio that is not reported, with the reason."""

    reason: str


def spread(values: Sequence[float]) -> Spread:
    """Return the median and quartiles of at least one value."""
    low, median, high = np.percentile(values, [25, 50, 75])
    return Spread(float(low), float(median), float(high))


def ratio(over: Sequence[float], under: Sequence[float], foreign: Sequence[float] = ()) -> Spread | Refused:
    """Return the ratio of two sides that took turns, formed per round, or the reason to refuse it.

    Args:
        over: numerators, one per round.
        under: denominators, of the same rounds.
        foreign: cores that other programs kept busy, for each launch of either side.
    """
    rounds = min(len(over), len(under))
    if rounds < LEAST_ROUNDS:
        return Refused(f"{rounds} round{'s' * (rounds != 1)}: fewer than {LEAST_ROUNDS} do not show how noisy it was")
    if len(foreign) and (taken := float(np.median(foreign))) > MOST_FOREIGN:
        return Refused(f"too noisy: other programs took {taken:.2f} cores meanwhile")
    found = spread([a / b for a, b in zip(over, under, strict=False)])
    if found.width > WIDEST:
        return Refused(f"too noisy: its quartiles are {found.low:.3g} and {found.high:.3g}")
    return found


def verdict(before: Sequence[float], after: Sequence[float]) -> str:
    """Return whether times changed: `slower`, `faster`, `within the spread`, or why that is unknown."""
    if min(len(before), len(after)) < LEAST_ROUNDS:
        return "too few rounds"
    a, b = spread(before), spread(after)
    if b.low > a.high:
        return "slower"
    return "faster" if b.high < a.low else "within the spread"


def shown(value: float | None, digits: int = 0) -> str:
    """Format a figure of a table; a dash if it is unknown."""
    return NOTHING if value is None else f"{value:.{digits}f}"
