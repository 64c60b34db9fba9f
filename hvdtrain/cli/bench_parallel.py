"""`bench --parallel`: compare layouts of ranks."""

import argparse
import functools
import shlex
from pathlib import Path

from hvdtrain.bench.layouts import ALWAYS, MODELS, layouts, options_of
from hvdtrain.cli.bench_suite import OUT, Folder, refuse_launchers
from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import ended_by_exceptions, run_here

FLAG = "--parallel"

_DESCRIPTION = """\
Compares layouts of ranks for a transformer: ZeRO, tensor, sequence and pipeline parallelism and some of them together,
beside data parallelism. Tells the time of a step, the peak of memory, and the bytes on the wire by formula and, over
Gloo, as counted. Writes results.json, report.md and report.html into OUT/DATE-HOST.
"""


def main(argv: list[str]) -> int:
    """Run the comparison, write the report and return the exit code: 1 if nothing could be measured."""
    with ended_by_exceptions():
        return run_here(lambda: _parser().parse_args(argv), lambda arguments: _bench(arguments, argv))


def _parser() -> Parser:
    models = "\n".join(f"  {name:<6}{one.about}" for name, one in MODELS.items())
    names = "\n".join(f"  {name:<18}{' '.join(options)}" for name, options in layouts(4).items())
    parser = Parser(
        f"bench {FLAG}",
        description=_DESCRIPTION,
        epilog=f"models:\n{models}\n\nlayouts, as of 4 ranks:\n{names}",
    )
    parser.add_argument("--model", choices=tuple(MODELS), default="lm")
    parser.add_argument("--layouts", nargs="+", metavar="LAYOUT", help=f"all; {', '.join(ALWAYS)} always take part")
    parser.add_argument("--ranks", nargs="+", type=_several, default=[2], help="numbers of ranks (2)")
    parser.add_argument("--controllers", nargs="+", choices=("mpi", "gloo"), default=["mpi", "gloo"])
    parser.add_argument("--steps", type=positive, default=30, help="steps of a launch (30)")
    parser.add_argument("--rounds", type=positive, default=3, help="launches of each layout (3)")
    parser.add_argument("--limit", type=positive, default=900, help="seconds that a launch may take (900)")
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"the report goes to OUT/DATE-HOST ({OUT})")
    return parser


def _several(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2. Received: {text}.")
    return int(text)


def _bench(arguments: argparse.Namespace, argv: list[str]) -> int:
    refuse_launchers()
    from hvdtrain.bench.parallel import Comparison, run_layouts
    from hvdtrain.bench.results import ParallelResults

    chosen = {ranks: _chosen(arguments.layouts, ranks) for ranks in arguments.ranks}
    compared = Comparison(
        model=arguments.model,
        ranks=arguments.ranks,
        layouts=chosen,
        controllers=arguments.controllers,
        rounds=arguments.rounds,
        steps=arguments.steps,
        limit_s=arguments.limit,
    )
    command = shlex.join(["python", "-m", "hvdtrain", "bench", FLAG, *argv])
    options = {name: value for name, value in vars(arguments).items() if name != "out"}
    folder = Folder(arguments.out, "parallel")
    log = functools.partial(print, flush=True)
    log(f"{sum(map(len, chosen.values()))} layouts, {arguments.rounds} rounds; {folder.path}")
    cells = run_layouts(
        compared, log=log, keep=lambda cells: folder.keep(parallel=ParallelResults(command, options, cells))
    )
    log(folder.report())
    return 0 if any(cell.rounds for cell in cells) else 1


def _chosen(names: list[str] | None, ranks: int) -> list[str]:
    """Return the layouts that are compared; an unknown one is refused before anything runs."""
    chosen = list(dict.fromkeys([*ALWAYS, *(names or layouts(ranks))]))
    for name in chosen:
        options_of(name, ranks)
    return chosen
