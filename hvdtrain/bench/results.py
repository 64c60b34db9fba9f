"""results.json and its schema. No TensorFlow."""

import json
from dataclasses import KW_ONLY, asdict, field
from pathlib import Path
from typing import Any, Literal

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

FILE = "results.json"


@section
class GradientSize:
    """One gradient of a model."""

    bytes: int
    """Size of the variable."""
    rows_per_sample: float | None = None
    """Rows of an embedding table that a sample touches, with duplicates; None for a dense gradient."""
    row_bytes: int = 0
    """Bytes of a row with its index."""


@section
class Round:
    """One launch of one side."""

    _: KW_ONLY
    windows_ms: list[float]
    """Milliseconds per step, for each window after the warm-up, on rank 0."""
    cpu_s: float
    """CPU seconds per step, over all processes and threads of the side."""
    peak_rss_mib: list[float]
    """Peak memory of each process, up to the last window."""
    foreign_cores: float
    """Cores that other programs kept busy during the launch."""
    breakdown_ms: dict[str, float] | None = None
    """Breakdown of the step; None if unavailable."""
    kernel_share: float | None = None
    """Share of the CPU time that the kernel took; None in results of earlier versions."""
    page_faults: float | None = None
    """Page faults per step, over all processes of the side; None in results of earlier versions."""


@section
class Cell:
    """All rounds of a side with one setting."""

    _: KW_ONLY
    side: str
    model: str
    ranks: int
    batch: int
    precision: str
    accumulate: int
    command: str
    """Command that repeats one launch."""
    rounds: list[Round] = field(default_factory=list)
    skipped: str | None = None
    """Why it was not measured, or not completely."""
    settings: dict[str, str] = field(default_factory=dict)
    """Settings that the processes report: threads, cores, environment variables."""
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
    """Size as defined by nccl-tests, see `bandwidth`."""
    times_ms: list[float]
    """Milliseconds per call on the slowest rank, for each round."""


@section
class EngineRun:
    """The launch of an engine, and the collectives it lacks."""

    _: KW_ONLY
    engine: str
    command: str
    settings: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """Reasons by collective; `all` if nothing was measured."""
    foreign_cores: list[float] = field(default_factory=list)


@section
class CollectivesResults:
    """The comparison of collectives."""

    _: KW_ONLY
    command: str
    options: dict[str, Any]
    ranks: int
    engines: list[EngineRun]
    series: list[Series]


@section
class LayoutRound:
    """One launch of one layout of ranks."""

    step_ms: float
    """Median step."""
    peak_mib: float
    """Peak memory of the rank that needs most."""
    sent_mb: float | None
    """Megabytes on the loopback per step; None where the ranks do not use it."""
    foreign_cores: float
    """Cores that other programs kept busy during the launch."""


@section
class LayoutCell:
    """All rounds of a layout."""

    _: KW_ONLY
    layout: str
    model: str
    controller: str
    ranks: int
    command: str
    """Command that repeats one launch."""
    parameters: int | None = None
    rounds: list[LayoutRound] = field(default_factory=list)
    skipped: str | None = None
    """Why it was not measured, or not completely."""


@section
class ParallelResults:
    """The comparison of layouts of ranks."""

    command: str
    options: dict[str, Any]
    cells: list[LayoutCell]


@section
class Results:
    """The contents of results.json."""

    _: KW_ONLY
    date: str
    host_class: str
    environment: dict[str, Any]
    """Versions, machine, environment variables, as in `python -m hvdtrain env`."""
    format: Literal[1] = 1
    suite: SuiteResults | None = None
    collectives: CollectivesResults | None = None
    parallel: ParallelResults | None = None


def write_results(results: Results, folder: Path) -> None:
    """Validate `results` and write them to the folder's results.json atomically."""
    from hvdtrain.observability.summary import json_safe, write_json

    values = json_safe(asdict(results))
    parsed(values, str(folder / FILE))
    write_json(folder / FILE, values)


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
        raise ConfigError(f"The results {file} are no JSON: {error}.") from error
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
        raise ConfigError(f"{origin} are no results of bench:\n" + "\n".join(places[:10])) from error
