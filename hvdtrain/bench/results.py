"""What a measurement leaves: results.json and its schema; no TensorFlow."""

import json
from dataclasses import asdict, field
from pathlib import Path
from typing import Any, Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

FILE = "results.json"


@section
class GradientSize:
    """One gradient of a model."""

    bytes: int
    """Of the whole variable."""
    rows_per_sample: float | None = None
    """Rows of an embedding table that a sample touches, duplicates counted; None for a dense gradient."""
    row_bytes: int = 0
    """Of a row with its index."""


@section
class Round:
    """One launch of one side."""

    windows_ms: list[float]
    """Milliseconds a step, of each window of steps after the warm-up, on rank 0."""
    cpu_s: float
    """Seconds of processor time a step, of all processes and threads of the side."""
    peak_rss_mib: list[float]
    """Of each process, up to the end of the windows."""
    foreign_cores: float
    """Cores' worth of time that other programs took during the launch."""
    breakdown_ms: dict[str, float] | None = None
    """Parts of a step; None where they cannot be told apart."""


@section
class Cell:
    """One side at one size: every round of it."""

    side: str
    model: str
    ranks: int
    batch: int
    precision: str
    accumulate: int
    command: str
    """What a reader types to repeat one launch."""
    rounds: list[Round] = field(default_factory=list)
    skipped: str | None = None
    """Why it was not measured, or not to the end."""
    settings: dict[str, str] = field(default_factory=dict)
    """What the processes say of themselves: threads, cores, environment variables that they set."""
    parameters: int | None = None
    gradients: list[GradientSize] | None = None


@section
class SuiteResults:
    """The comparison of training steps."""

    command: str
    options: dict[str, Any]
    cells: list[Cell]


@section
class Series:
    """One collective of one engine at one size."""

    engine: str
    collective: str
    bytes: int
    """Size as nccl-tests counts it: see `bandwidth`."""
    times_ms: list[float]
    """Of one call, on the slowest rank, in each round."""


@section
class EngineRun:
    """How an engine was started, and what it could not do."""

    engine: str
    command: str
    settings: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by collective; `all` where nothing was measured."""
    foreign_cores: list[float] = field(default_factory=list)


@section
class CollectivesResults:
    """The comparison of collectives."""

    command: str
    options: dict[str, Any]
    ranks: int
    engines: list[EngineRun]
    series: list[Series]


@section
class Results:
    """Everything in results.json."""

    date: str
    host_class: str
    environment: dict[str, Any]
    """Versions, machine, environment variables, as `python -m hvdtrain env` tells them."""
    format: Literal[1] = 1
    suite: SuiteResults | None = None
    collectives: CollectivesResults | None = None


def write_results(results: Results, folder: Path) -> None:
    """Check `results` and write them to the folder's results.json, whole or not at all."""
    from hvdtrain.observability.summary import json_safe, write_json

    values = json_safe(asdict(results))
    parsed(values, str(folder / FILE))
    write_json(folder / FILE, values)


def read_results(path: Path) -> Results:
    """Return what `path`, a folder of results or its results.json, holds.

    Raises:
        ConfigError: it is not there, or does not fit the schema.
    """
    file = path / FILE if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The results {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise ConfigError(f"The results {file} are no JSON: {error}.") from error
    return parsed(values, str(file))


def parsed(values: Any, origin: str) -> Results:
    """Return `values` as results.

    Raises:
        ConfigError: naming each place that does not fit the schema.
    """
    import pydantic

    try:
        return pydantic.TypeAdapter(Results).validate_python(values)
    except pydantic.ValidationError as error:
        places = [f"  {'.'.join(map(str, detail['loc'])) or 'all'}: {detail['msg']}" for detail in error.errors()]
        raise ConfigError(f"{origin} are no results of bench:\n" + "\n".join(places[:10])) from error
