"""`bench report`: write the report of existing results, such as those of an interrupted comparison."""

import argparse
from pathlib import Path

from hvdtrain.cli.parser import Parser
from hvdtrain.cli.running import run_here


def main(argv: list[str]) -> int:
    """Write the report of existing results."""
    return run_here(lambda: _parser().parse_args(argv), _report)


def _parser() -> Parser:
    parser = Parser(
        "bench report",
        description="Writes report.md and report.html anew from the results.json of a folder, which also a comparison "
        "that was interrupted leaves.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of results")
    return parser


def _report(arguments: argparse.Namespace) -> int:
    from hvdtrain.bench.report import write_report
    from hvdtrain.bench.results import read_results

    write_report(read_results(arguments.folder), arguments.folder)
    print(f"report      {arguments.folder / 'report.html'}")
    return 0
