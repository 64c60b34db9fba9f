"""Outcomes of all pytest runs of `launch/test.sh`: each run writes a file, and one summary is printed of them.

python -m tests.report FOLDER [--timings FILE]   what was skipped and why, what failed, and the counts
python -m tests.report --table FILE              a Markdown table, by file, of the seconds in such a FILE
"""

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

FAILED_SECTIONS, SKIPPED_SECTIONS = "failed", "skipped"
"""Files of `launch/test.sh` in the folder: names of sections that failed, and reasons for what it skipped."""
ROW_S = 15.0
"""Files that take less share a row of their folder in the table."""


@dataclass
class Outcome:
    outcome: str = "passed"
    seconds: float = 0.0
    reason: str = ""


class Recorder:
    """Pytest plugin that writes the outcome of each test to `path`, once the run ends.

    A test's property `seconds` replaces its measured time, as for distributed checks, of which many share a launch.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._outcomes: dict[str, Outcome] = defaultdict(Outcome)
        self._exact: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._add(report)
        self._outcomes[report.nodeid].seconds += report.duration
        for name, value in report.user_properties:
            if name == "seconds":
                self._exact[report.nodeid] = float(value)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if not report.passed:
            self._add(report)

    def _add(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        outcome = self._outcomes[report.nodeid]
        if report.failed:
            outcome.outcome = "failed"
        elif report.skipped and outcome.outcome == "passed":
            outcome.outcome = "skipped"
            *_, text = report.longrepr if isinstance(report.longrepr, tuple | list) else [str(report.longrepr)]
            outcome.reason = str(text).removeprefix("Skipped: ")

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        for name, seconds in self._exact.items():
            self._outcomes[name].seconds = seconds
        rounded = {name: asdict(each) | {"seconds": round(each.seconds, 2)} for name, each in self._outcomes.items()}
        self._path.write_text(json.dumps(rounded, indent=1), encoding="utf-8")


def read(file: Path) -> dict[str, Outcome]:
    return {name: Outcome(**fields) for name, fields in json.loads(file.read_text(encoding="utf-8")).items()}


def summary(folder: Path) -> tuple[str, bool]:
    """Return the last lines of `launch/test.sh`, and whether everything passed."""
    runs = {file.stem: read(file) for file in sorted(folder.glob("*.json"))}
    ran = [(f"{name} [{run}]", each) for run, tests in runs.items() for name, each in tests.items()]
    skipped: dict[str, list[str]] = defaultdict(list)
    for name, each in ran:
        if each.outcome == "skipped":
            skipped[each.reason].append(name)
    for reason in _lines(folder / SKIPPED_SECTIONS):
        skipped[reason] = []
    failed = [name for name, each in ran if each.outcome == "failed"]
    # Lint and types have no tests, and a run may end before its first.
    noticed = {run for run, tests in runs.items() if any(each.outcome == "failed" for each in tests.values())}
    failed += [section for section in _lines(folder / FAILED_SECTIONS) if section not in noticed]
    lines = ["Skipped:" if skipped else "Nothing was skipped."]
    for reason, names in sorted(skipped.items()):
        lines.append(f"  {reason}")
        lines += [f"    {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")] if names else []
    lines += ["Failed:", *(f"  {name}" for name in failed)] if failed else []
    passed = sum(each.outcome == "passed" for _, each in ran)
    lines.append(f"{passed} passed, {len(failed)} failed, {len(ran) - passed - _failures(ran)} skipped")
    return "\n".join(lines), not failed


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _failures(ran: Iterable[tuple[str, Outcome]]) -> int:
    return sum(each.outcome == "failed" for _, each in ran)


def table(outcomes: Mapping[str, Outcome]) -> str:
    """Return seconds by file, longest first; a distributed check counts for the file that it is in."""
    by_file: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for name, each in outcomes.items():
        file, _, test = name.partition("::")
        if check := re.search(r"\[(?P<world>[\w-]+)-(?P<file>\w+)\.(?P<check>check_\w+)\]", test):
            file, test = f"tests/distributed/checks/{check['file']}.py", f"{check['check']} ({check['world']})"
        by_file[file].append((each.seconds, test))
    rows: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for file, tests in by_file.items():
        short = sum(seconds for seconds, _ in tests) < ROW_S
        rows[f"others of {'/'.join(Path(file).parts[:2])}" if short else file] += tests
    lines = ["| file | tests | seconds | longest |", "|---|---|---|---|"]
    for file, tests in sorted(rows.items(), key=lambda row: -sum(seconds for seconds, _ in row[1])):
        longest = max(tests)
        total = sum(seconds for seconds, _ in tests)
        lines.append(f"| {file} | {len(tests)} | {total:.0f} | {longest[0]:.1f}: `{longest[1]}` |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.report")
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--timings", type=Path, help="write all outcomes and seconds to this file, too")
    parser.add_argument("--table", type=Path, help="print a table of the seconds in this file")
    given = parser.parse_args()
    if given.table:
        print(table(read(given.table)))
        return 0
    if given.timings:
        merged = {
            name: asdict(each) for file in sorted(given.folder.glob("*.json")) for name, each in read(file).items()
        }
        given.timings.write_text(json.dumps(merged, indent=1), encoding="utf-8")
    text, well = summary(given.folder)
    print(text)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
