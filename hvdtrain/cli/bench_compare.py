"""`bench compare`: show the changes between two results."""

import argparse
from pathlib import Path

from hvdtrain.cli.parser import Parser
from hvdtrain.cli.running import run_here


def main(argv: list[str]) -> int:
    """Print the changes between two results."""
    return run_here(lambda: _parser().parse_args(argv), _compare)


def _parser() -> Parser:
    parser = Parser(
        "bench compare",
        description="Prints, as Markdown, what changed between two results of bench: times of steps and collectives, "
        "versions and settings.",
    )
    parser.add_argument("before", type=Path, metavar="A", help="folder of results, or its results.json")
    parser.add_argument("after", type=Path, metavar="B", help="the other one")
    return parser


def _compare(arguments: argparse.Namespace) -> int:
    from hvdtrain.bench.compare import compared
    from hvdtrain.bench.document import to_markdown
    from hvdtrain.bench.results import read_results

    print(to_markdown(compared(read_results(arguments.before), read_results(arguments.after))), end="")
    return 0
