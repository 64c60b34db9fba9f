"""`bench collectives`: compare collectives over message sizes."""

import argparse
import functools
import shlex
from pathlib import Path

from hvdtrain.bench.bandwidth import COLLECTIVES, parsed_size
from hvdtrain.bench.engines import ENGINES, engine
from hvdtrain.cli.bench_suite import OUT, Folder, refuse_launchers
from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import ended_by_exceptions, run_here

_DESCRIPTION = """\
Times collectives over sizes, all engines in turn, each launch in fresh processes, beside what the host's memory allows.
Tells latency, algorithm and bus bandwidth as nccl-tests defines them. At 400 MB a rank takes up to 2 GB of memory.
"""

SIZES = ("1KB", "64KB", "1MB", "16MB", "100MB", "400MB")


def main(argv: list[str]) -> int:
    """Run the comparison, write the report and return the exit code: 1 if nothing could be measured."""
    with ended_by_exceptions():
        return run_here(lambda: _parser().parse_args(argv), lambda arguments: _bench(arguments, argv))


def _parser() -> Parser:
    width = max(map(len, ENGINES)) + 2
    parser = Parser(
        "bench collectives",
        description=_DESCRIPTION,
        epilog="engines:\n" + "\n".join(f"  {name:<{width}}{one.about}" for name, one in ENGINES.items()),
    )
    parser.add_argument("--engines", nargs="+", metavar="NAME", default=list(ENGINES), help="all by default")
    parser.add_argument("--collectives", nargs="+", choices=COLLECTIVES, default=list(COLLECTIVES))
    parser.add_argument("--sizes", nargs="+", type=_size, default=list(map(parsed_size, SIZES)), help=" ".join(SIZES))
    parser.add_argument("--ranks", type=positive, default=2, help="ranks (2)")
    parser.add_argument("--rounds", type=positive, default=5, help="launches of each engine (5)")
    parser.add_argument("--limit", type=positive, default=900, help="seconds that a launch may take (900)")
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"the report goes to OUT/DATE-HOST ({OUT})")
    return parser


def _size(text: str) -> int:
    try:
        return parsed_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a size of at least 1KB: 64KB, 1MB. Received: {text}.") from None


def _bench(arguments: argparse.Namespace, argv: list[str]) -> int:
    refuse_launchers()
    from hvdtrain.bench.collectives import run_collectives
    from hvdtrain.bench.results import CollectivesResults

    for name in arguments.engines:
        engine(name)
    folder = Folder(arguments.out, "collectives")
    log = functools.partial(print, flush=True)
    log(f"{len(arguments.engines)} engines, {arguments.rounds} rounds; {folder.path}")
    runs, series = run_collectives(
        arguments.engines,
        arguments.collectives,
        sorted(arguments.sizes),
        ranks=arguments.ranks,
        rounds=arguments.rounds,
        limit_s=arguments.limit,
        log=log,
    )
    command = shlex.join(["python", "-m", "hvdtrain", "bench", "collectives", *argv])
    options = {name: value for name, value in vars(arguments).items() if name != "out"}
    folder.keep(
        collectives=CollectivesResults(
            command=command, options=options, ranks=arguments.ranks, engines=runs, series=series
        )
    )
    log(folder.report())
    return 0 if series else 1
