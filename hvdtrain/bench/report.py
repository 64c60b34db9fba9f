"""Reports of results and of what changed between two, by one template for each of Markdown and HTML. No TensorFlow."""

import base64
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.results import LEAST_ROUNDS, NOTHING, Comparison, Refused, Results, Run, Spread, spread, verdict
from hvdtrain.config.registry import optional_package, resolve
from hvdtrain.observability.summary import replace_file

SECTIONS = {
    "suite": "hvdtrain.bench.suite_report:section",
    "collectives": "hvdtrain.bench.collectives:section",
    "parallel": "hvdtrain.bench.layouts:section",
    "autotune": "hvdtrain.bench.autotune:section",
}
"""Functions that yield the blocks about a comparison; others are shown as plain tables."""
RULE = (
    "The two were not measured in turn, so that a machine that was slower on one day looks like a change. Reported "
    f"is a change where the quartiles of the two do not overlap and both have at least {LEAST_ROUNDS} rounds."
)


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the report."""

    text: str
    level: int = 2
    kind = "heading"


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str
    kind = "paragraph"


@dataclass(frozen=True)
class Table:
    """A table; all but the first `texts` columns hold numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1
    kind = "table"


@dataclass(frozen=True)
class Code:
    """Commands to type."""

    text: str
    kind = "code"


@dataclass(frozen=True)
class Figure:
    """A PNG figure; Markdown shows only its caption."""

    png: bytes
    caption: str
    kind = "figure"

    @property
    def base64(self) -> str:
        """The picture, for a page that needs no other file."""
        return base64.b64encode(self.png).decode()


Block = Heading | Paragraph | Table | Code | Figure


def check_packages(need: str) -> None:
    """Refuse to begin without the packages that a report is made with.

    Raises:
        ConfigError: one is not installed; names the command that installs it.
    """
    for package in ("jinja2", "matplotlib"):
        optional_package(package, "bench", need)


def render(blocks: Sequence[Block], form: str, title: str = "") -> str:
    """Render the blocks as `md`, or as one `html` page, figures included."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hvdtrain.bench", ""),
        autoescape=form == "html",
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    return environment.get_template(f"report.{form}.jinja").render(blocks=blocks, title=title)


def write_report(results: Results, folder: Path) -> str:
    """Write report.md and report.html into the folder, and return a line that names it."""
    title = f"hvdtrain bench, {results.date}, {results.host_class}"
    blocks = [Heading(title, 1), *report(results)]
    for form in ("md", "html"):
        replace_file(folder / f"report.{form}", render(blocks, form, title))
    return f"report      {folder / 'report.html'}"


def report(results: Results) -> Iterator[Block]:
    """Yield the report's blocks."""
    yield _host(results.environment)
    for kind, comparison in results.comparisons.items():
        if kind in SECTIONS:
            yield from resolve("comparison", kind, SECTIONS)(comparison)
        else:
            yield from plain_section(comparison, kind)


def _host(environment: dict[str, Any]) -> Table:
    machine, packages = environment.get("machine", {}), environment.get("packages", {})
    facts = {
        "processor": f"{machine.get('cpu')}, {machine.get('usable_cores')} of {machine.get('cores')} cores usable",
        "memory": f"{machine.get('memory_gib')} GiB",
        "system": f"{machine.get('system')}, kernel {machine.get('kernel')}",
        "GPUs": ", ".join(environment.get("gpus") or []) or "none",
        "MPI": str((environment.get("mpi") or {}).get("mpirun")),
        "Python": str(environment.get("python", {}).get("version")),
        **{name: str(version) for name, version in packages.items() if version is not None},
        "variables": ", ".join(f"{k}={v}" for k, v in environment.get("variables", {}).items()) or "none",
    }
    return Table(["machine and versions", ""], [[name, value] for name, value in facts.items()], texts=2)


def plain_section(comparison: Comparison, title: str, about: str = "") -> Iterator[Block]:
    """Yield every figure of a comparison, with its quartiles over the rounds."""
    yield Heading(title)
    yield Code(comparison.command)
    if about:
        yield Paragraph(about)
    rows = [
        [run.name, titled(run.setting), name, *quartiles(spread(values), ".4g"), str(len(values))]
        for run in comparison.runs
        for name, values in series(run).items()
    ]
    yield Table(["", "", "figure", "median", "quartiles", "rounds"], rows, texts=3)
    yield from closing(comparison.runs, {})


def quartiles(values: Spread | Refused, form: str) -> list[str]:
    """Return the cells of a median and its quartiles, in a format such as `.2f`."""
    if isinstance(values, Refused):
        return [NOTHING, NOTHING]
    return [f"{values.median:{form}}", f"{values.low:{form}} .. {values.high:{form}}"]


def closing(runs: Sequence[Run], about: Mapping[str, str]) -> Iterator[Block]:
    """Yield the end of every section: what was not measured, the commands, and the sides with their settings.

    Args:
        runs: of a comparison.
        about: what each side is, by name.
    """
    rows = [
        [run.name, what, str(len(run.rounds)), reason]
        for run in runs
        for what, reason in {titled(run.setting): run.skipped, **run.facts.get("unavailable", {})}.items()
        if reason is not None
    ]
    if rows:
        yield Heading("Not measured", 3)
        yield Table(["side", "", "rounds before", "reason"], rows, texts=4)
    commands = [run.command for run in runs if run.command]
    if commands:
        yield Heading("To repeat a launch", 3)
        yield Code("\n".join(commands))
    settings = {run.name: "" for run in runs if run.name in about}
    settings |= {
        run.name: ", ".join(f"{key} {value}" for key, value in run.facts["settings"].items())
        for run in runs
        if run.name in about and "settings" in run.facts
    }
    if settings:
        rows = [[name, about[name], known] for name, known in settings.items()]
        yield Table(["side", "what it is", "what its processes run with"], rows, texts=3)


def titled(setting: dict[str, Any]) -> str:
    """Return a setting in words; precision and accumulation only if they are not the usual ones."""
    usual = {"precision": "float32", "accumulate": 1}
    words = []
    for name, value in setting.items():
        if value == usual.get(name):
            continue
        if name == "ranks":
            words.append(f"{value} rank" + "s" * (value > 1))
        else:
            words.append(str(value) if isinstance(value, str) else f"{name} {value}")
    return ", ".join(words)


def series(run: Run, names: Collection[str] | None = None) -> dict[str, list[float]]:
    """Return the figures of a run over its rounds, those of a window or process by their median.

    Args:
        run: the run.
        names: the figures; None: all.
    """
    found: dict[str, list[float]] = {}
    for one in run.rounds:
        for name, value in one.figures.items():
            if names is None or name in names:
                parts = value if isinstance(value, dict) else {} if value is None else {name: value}
                for part, taken in parts.items():
                    found.setdefault(part, []).append(float(np.median(taken)))
    return found


def compared(before: Results, after: Results) -> Iterator[Block]:
    """Yield the changes between two results."""
    yield Heading(f"From {before.date}, {before.host_class} to {after.date}, {after.host_class}", 1)
    changed = [[name, a, b] for name, a, b in differences(before.environment, after.environment)]
    yield Table(["machine, versions and variables that differ", "before", "after"], changed or [["none", "", ""]], 3)
    yield Paragraph(RULE)
    for kind in dict.fromkeys([*before.comparisons, *after.comparisons]):
        old, new = (_times(results.comparisons.get(kind)) for results in (before, after))
        yield Heading(kind)
        columns = ["", "", "", "ms before", "ms after", "after / before", "change"]
        rows = [[*key, *_change(old.get(key), new.get(key))] for key in dict.fromkeys([*old, *new])]
        yield Table(columns, rows, texts=3)


def _times(comparison: Comparison | None) -> dict[tuple[str, str, str], list[float]]:
    """Return all times of a comparison by side, setting and figure; the parts of a step are too noisy to compare."""
    found = {}
    for run in [] if comparison is None else comparison.runs:
        names = {name for one in run.rounds for name in one.figures if name.endswith("ms")}
        for name, values in series(run, names - {"breakdown_ms"}).items():
            found[run.name, titled(run.setting), name] = values
    return found


def _change(old: list[float] | None, new: list[float] | None) -> list[str]:
    medians = [NOTHING if one is None else f"{spread(one).median:.4g}" for one in (old, new)]
    if old is None or new is None:
        return [*medians, NOTHING, "only after" if old is None else "only before"]
    return [*medians, f"{spread(new).median / spread(old).median:.3f}", verdict(old, new)]


def differences(before: Any, after: Any, name: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (name, before, after) of the differences of two nested dicts."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            if key != "available_memory_gib":
                yield from differences(before.get(key), after.get(key), f"{name}.{key}" if name else str(key))
    elif before != after:
        yield name, str(before), str(after)
