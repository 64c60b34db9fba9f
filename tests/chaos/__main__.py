"""Strikes trainings at random, and sees whether they end and go on as they have to.

    python -m tests.chaos --rounds 200 --seed 1 --jobs 2 --out rounds.jsonl
    python -m tests.chaos --matrix [WAY …]

A round is drawn from its seed alone: the command of each is in its line of the file. With --matrix each rank hangs and
crashes in each way, under each controller.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from tests.chaos.faults import NAMES, faults_of
from tests.chaos.matrix import CASES, MORE_CASES, cells, matrix_table, play_cell
from tests.chaos.play import Outcome
from tests.chaos.report import table
from tests.chaos.rounds import WORLDS, draw
from tests.chaos.workers import leave_at_sigterm, played, pool


def main() -> int:
    options = _parse()
    leave_at_sigterm()
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    failed = _play_rounds(options, folder) if options.matrix is None else _play_matrix(options, folder)
    if not failed:
        shutil.rmtree(folder)
    return int(failed)


def _play_rounds(options: argparse.Namespace, folder: Path) -> bool:
    drawn = [draw(seed, options.faults, options.worlds) for seed in range(options.seed, options.seed + options.rounds)]
    records, begun = [], time.monotonic()
    with pool(options.jobs) as players:
        for of, outcome in players.imap_unordered(partial(played, folder=folder), drawn):
            if isinstance(outcome, str):
                print(f"{of.name}: not played: {outcome}", flush=True)
                continue
            records.append(outcome.record())
            _tell(outcome, options.out)
    failed = [each for each in records if each["problems"]]
    print(f"\n{table(records)}\n\n{len(records)} rounds in {(time.monotonic() - begun) / 60:.1f} minutes.")
    for each in failed:
        print(f"{each['problems']}\n  {each['command']}\n  {each['folder']}")
    return bool(failed)


def _play_matrix(options: argparse.Namespace, folder: Path) -> bool:
    outcomes = []
    with pool(options.jobs) as players:
        for each in players.imap(partial(play_cell, folder=folder), cells(options.matrix)):
            outcomes.append(each)
            print(f"{each.cell}: {'; '.join(each.problems) or 'as it has to be'}", flush=True)
            if each.problems:
                print(each.text[-4000:], flush=True)
    print(f"\n{matrix_table(outcomes)}")
    return any(each.problems for each in outcomes)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rounds", type=int, default=10, help="number of rounds")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first round; the next ones count on")
    parser.add_argument("--faults", nargs="+", choices=NAMES, default=list(NAMES), metavar="FAULT", help="of these")
    parser.add_argument("--worlds", nargs="+", default=list(WORLDS), metavar="CONTROLLER:RANKS", help="in these")
    parser.add_argument("--jobs", type=int, default=1, help="rounds at a time")
    parser.add_argument("--out", type=Path, help="file to which each round adds a line of JSON")
    ways = [*CASES, *MORE_CASES]
    parser.add_argument("--matrix", nargs="*", choices=ways, metavar="WAY", help="hang and crash in these ways instead")
    options = parser.parse_args()
    options.faults = [name for name in options.faults if any(name in faults_of(world) for world in options.worlds)]
    if not options.faults:
        parser.error("none of these faults can strike any of these worlds")
    return options


def _tell(outcome: Outcome, out: Path | None) -> None:
    figures = f"told after {outcome.detected_s} s, ended after {outcome.ended_s} s, {outcome.lost} steps lost"
    print(f"{outcome.round.name}: {'; '.join(outcome.problems) or 'as it has to be'}: {figures}", flush=True)
    if outcome.problems:
        print(f"  {outcome.round.command}\n  {outcome.folder}\n{outcome.text}", flush=True)
    if out is not None:
        with out.open("a") as file:
            file.write(json.dumps(outcome.record()) + "\n")


if __name__ == "__main__":
    sys.exit(main())
