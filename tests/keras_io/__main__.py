"""Train the examples of keras.io in one process and on ranks: `python -m tests.keras_io [--table PAGE] [NAME ...]`.

Each trains by Keras alone, then on one and on two ranks by hvdtrain.Trainer or, where it has a loop of its own, by
hvdtrain.whole_batch.
"""

import argparse
import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.launching import Job, launched

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "keras_support.md"
BEGIN, END = "<!-- written by python -m tests.keras_io --table -->\n", "<!-- end of keras.io's examples -->\n"
RANKS = (1, 2)
SECONDS = 30
"""For an example, at most."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.keras_io")
    parser.add_argument("--table", type=Path, metavar="PAGE", help="write these rows of the table into this page")
    parser.add_argument("--log", type=Path, help="what the trainings print")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all")
    given = parser.parse_args()
    from tests.keras_io.examples import EXAMPLES

    names = given.names or list(EXAMPLES)
    with tempfile.TemporaryDirectory() as folder:
        results = compared(names, folder, log=given.log)
    for name in names:
        print(f"{name:34}", " | ".join(results[ranks].get(name, "did not end") for ranks in RANKS))
    if given.table:
        given.table.write_text(written(given.table.read_text(encoding="utf-8"), results), encoding="utf-8")
    return int(any(said != "equal" for each in results.values() for said in each.values()))


def compared(
    names: Sequence[str], folder: str, *, ranks: Sequence[int] = RANKS, log: Path | None = None
) -> dict[int, dict[str, str]]:
    """Return what comes out for each number of ranks, by name."""
    alone = trained(names, "plain", folder, ranks=0, log=log)
    failed = {name: f"Keras alone: {said}" for name, said in alone.items() if said != "trained"}
    results = {}
    names = [name for name in names if name not in failed]
    for number in ranks:
        results[number] = {**failed, **trained(names, "trainer", folder, ranks=number, log=log)}
    return results


def trained(names: Sequence[str], mode: str, folder: str, *, ranks: int, log: Path | None) -> dict[str, str]:
    """Train in one job, or in another where one ends early."""
    results: dict[str, str] = {}
    left = list(names)
    while left:
        words = launched("mpirun" if ranks else "none", ranks, "-m", "tests.keras_io.train")
        with Job([*words, mode, folder, *left], cwd=ROOT, PYTHONPATH=str(ROOT)) as job:
            job.wait(seconds=60 + SECONDS * len(left))
        if log is not None:
            with log.open("a", encoding="utf-8") as file:
                file.write(job.text)
        found = dict(json.loads(line) for line in re.findall(r"^RESULT (.*)$", job.out, re.MULTILINE))
        results |= found
        left = [name for name in left if name not in found]
        if left:
            results[left.pop(0)] = "did not end"
    return results


def lines(results: Mapping[int, Mapping[str, str]], page: str) -> list[str]:
    """Return the table: what an example's own code is, and what comes out; of those left out now, what `page` has."""
    from tests.keras_io.examples import EXAMPLES

    made = ["| example | its own code | 1 rank | 2 ranks |", "|---|---|---|---|"]
    for name, example in EXAMPLES.items():
        row = f"| {title(example)} | {own_code(example)} |"
        if name in results[RANKS[0]]:
            made.append(f"{row} {' | '.join(results[ranks][name].replace('|', '/') for ranks in RANKS)} |")
        else:
            made.append(next((line for line in page.splitlines() if line.startswith(row)), f"{row} | |"))
    return made


def title(example: Callable[[], Any]) -> str:
    return str(example.__doc__).partition(": ")[0]


def own_code(example: Callable[[], Any]) -> str:
    return " ".join(str(example.__doc__).partition(": ")[2].split()).removesuffix(".")


def written(page: str, results: Mapping[int, Mapping[str, str]]) -> str:
    """Return the page with this table."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines(results, page)) + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    sys.exit(main())
