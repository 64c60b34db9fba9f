"""`bench engine`: one launch of one engine's collectives, as `bench collectives` starts it."""

import argparse

from hvdtrain.bench.bandwidth import parsed_size
from hvdtrain.bench.calls import measure
from hvdtrain.bench.engines import ENGINES
from hvdtrain.bench.timing import say
from hvdtrain.cli.parser import Parser, shows_help
from hvdtrain.cli.running import run_linked
from hvdtrain.config.registry import resolve
from hvdtrain.runtime.link import Link

_DESCRIPTION = """\
Times the collectives of one engine on the ranks that a launcher has started, and prints milliseconds a call as JSON.
bench collectives starts it; its reports show the whole command.
"""


def main(argv: list[str]) -> int:
    """Measure one engine and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    return run_linked(lambda files: _parse(argv), _measure)


def _parse(argv: list[str]) -> argparse.Namespace:
    return _parser().parse_args(argv)


def _parser() -> Parser:
    parser = Parser("bench engine", description=_DESCRIPTION)
    parser.add_argument("engine", choices=tuple(ENGINES))
    parser.add_argument("--collectives", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", type=parsed_size, required=True, help="1KB 4MB …")
    return parser


def _measure(link: Link, arguments: argparse.Namespace) -> None:
    code = {name: engine.code for name, engine in ENGINES.items()}
    caller = resolve("engine", arguments.engine, code)(link)
    answer = measure(caller, link, arguments.collectives, arguments.sizes)
    if link.environment.rank == 0:
        say(answer)
    link.control.barrier(60.0)
    caller.close()
    link.close()
