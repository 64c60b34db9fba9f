"""`bench`: compare training steps."""

import argparse
import functools
import shlex
import time
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hvdtrain.bench.catalog import MODELS
from hvdtrain.bench.catalog import USUAL as USUAL_MODELS
from hvdtrain.bench.sides import SIDES
from hvdtrain.bench.sides import USUAL as USUAL_SIDES
from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import ended_by_exceptions, run_here
from hvdtrain.config.errors import LaunchError
from hvdtrain.config.runtime import MallocName, RuntimeConfig
from hvdtrain.config.training import PrecisionName
from hvdtrain.runtime.launchers import detect_environment

if TYPE_CHECKING:
    from hvdtrain.bench.results import CollectivesResults, ParallelResults, SuiteResults

OUT = "bench"

_DESCRIPTION = """\
Compares steps of training: backends, models, ranks, precisions and accumulation, all sides in turn, each launch in
fresh processes. Writes results.json, report.md and report.html into OUT/DATE-HOST. One process on the cores of one rank
(one-core) always takes part: it is what efficiencies are shares of.
"""

_COMMANDS = """\
commands:
  bench --autotune      the settings of the exchange that are fastest on this machine
  bench --parallel      ZeRO, tensor and pipeline parallelism beside data parallelism: time, memory, bytes on the wire
  bench collectives     times of allreduce, allgather, reducescatter, alltoall and broadcast over sizes
  bench compare A B     what changed between two results
  bench report FOLDER   the report of results that are there, as after a comparison that was interrupted
  bench side, engine, layout
                        one launch, as the reports print them

"python -m hvdtrain bench COMMAND --help" shows the options of a command. Nothing else may run on the machine
meanwhile: where it was too noisy, no ratio is reported."""


def main(argv: list[str]) -> int:
    """Run the comparison, write the report and return the exit code: 1 if nothing could be measured."""
    with ended_by_exceptions():
        return run_here(lambda: parser().parse_args(argv), lambda arguments: _bench(arguments, argv))


def parser() -> Parser:
    """Return the parser of the command line."""
    models, sides = (_listed({name: one.about for name, one in some.items()}) for some in (MODELS, SIDES))
    made = Parser(
        "bench",
        description=_DESCRIPTION,
        epilog=f"backends:\n{sides}\n\nmodels:\n{models}\n\n{_COMMANDS}",
    )
    made.add_argument("--backends", nargs="+", metavar="NAME", default=list(USUAL_SIDES), help=" ".join(USUAL_SIDES))
    made.add_argument("--models", nargs="+", metavar="NAME", default=list(USUAL_MODELS), help=" ".join(USUAL_MODELS))
    made.add_argument("--ranks", nargs="+", type=positive, help="2, 4, 8 … up to the cores by default")
    made.add_argument("--precisions", nargs="+", choices=get_args(PrecisionName), default=["float32"])
    made.add_argument(
        "--accumulate",
        nargs="+",
        type=positive,
        default=[1],
        help="microbatches of a rank; the batch grows with them, and a microbatch stays as it is",
    )
    made.add_argument(
        "--scaling",
        nargs="+",
        choices=("strong", "weak"),
        default=["strong", "weak"],
        help="the batch of a step stays as it is for any number of ranks; or that of a rank does",
    )
    made.add_argument("--batch", type=positive, help="samples per step over all ranks, in place of the models' own")
    made.add_argument("--baseline", default="plain-mpi", help="whose time the others' are divided by (plain-mpi)")
    made.add_argument("--rounds", type=positive, default=5, help="launches of each side (5)")
    made.add_argument("--windows", type=positive, default=5, help="windows of steps in a launch (5)")
    made.add_argument("--warm-up", type=positive, default=2, help="windows before them that are not counted (2)")
    made.add_argument("--steps", type=positive, help="steps of a window; by default the model's own")
    made.add_argument("--cores", type=positive, default=1, help="cores of each rank (1)")
    made.add_argument(
        "--malloc",
        choices=get_args(MallocName),
        default=RuntimeConfig.malloc,
        help=f"memory allocator of all sides, the hand-written loops included ({RuntimeConfig.malloc})",
    )
    made.add_argument("--no-breakdown", action="store_true", help="do not find out where a step's time goes")
    made.add_argument("--limit", type=positive, default=900, help="seconds that a launch may take (900)")
    made.add_argument("--out", type=Path, default=Path(OUT), help=f"the report goes to OUT/DATE-HOST ({OUT})")
    return made


def _listed(about: dict[str, str]) -> str:
    width = max(map(len, about)) + 2
    return "\n".join(f"  {name:<{width}}{text}" for name, text in about.items())


def _bench(arguments: argparse.Namespace, argv: list[str]) -> int:
    refuse_launchers()
    from hvdtrain.bench.host import default_ranks
    from hvdtrain.bench.plan import Matrix, points
    from hvdtrain.bench.results import SuiteResults
    from hvdtrain.bench.sides import side
    from hvdtrain.bench.suite import Launching, run_suite

    side(arguments.baseline)
    arguments.ranks = arguments.ranks or default_ranks(arguments.cores)
    matrix = Matrix(
        sides=arguments.backends,
        models=arguments.models,
        ranks=arguments.ranks,
        precisions=arguments.precisions,
        accumulations=arguments.accumulate,
        scalings=arguments.scaling,
        batch=arguments.batch,
    )
    todo, refused = points(matrix)
    how = Launching(
        rounds=arguments.rounds,
        windows=arguments.windows,
        warm_up=arguments.warm_up,
        steps=arguments.steps,
        cores=arguments.cores,
        breakdown=not arguments.no_breakdown,
        malloc=arguments.malloc,
        limit_s=arguments.limit,
    )
    command = shlex.join(["python", "-m", "hvdtrain", "bench", *argv])
    options = {name: value for name, value in vars(arguments).items() if name != "out"}
    folder = Folder(arguments.out, "suite")
    log = functools.partial(print, flush=True)
    log(
        f"{len(todo)} sides and sizes, {arguments.rounds} rounds, {len(todo) * arguments.rounds} launches; "
        f"{folder.path}"
    )
    cells = run_suite(
        todo,
        refused,
        how,
        log=log,
        keep=lambda cells: folder.keep(suite=SuiteResults(command, options, cells)),
    )
    log(folder.report())
    return 0 if any(cell.rounds for cell in cells) else 1


def refuse_launchers() -> None:
    """Refuse to run under a launcher, since bench starts ranks itself."""
    environment = detect_environment()
    if environment.launcher != "none":
        raise LaunchError(f"bench starts its ranks itself: start it without {environment.launcher}.")


class Folder:
    """The results folder of a day, shared by the suite, the collectives and the layouts.

    Args:
        parent: the folder to create it in.
        part: the measurement: suite, collectives or parallel.
    """

    def __init__(self, parent: Path, part: str) -> None:
        from hvdtrain.bench.host import environment, host_class
        from hvdtrain.bench.report import free_folder
        from hvdtrain.bench.results import Results, read_results

        facts = environment()
        date, kind = time.strftime("%Y-%m-%d"), host_class(facts)
        self.path, shared = free_folder(parent, date, kind, part)
        self._results = read_results(self.path) if shared else Results(date=date, host_class=kind, environment=facts)

    def keep(
        self,
        *,
        suite: "SuiteResults | None" = None,
        collectives: "CollectivesResults | None" = None,
        parallel: "ParallelResults | None" = None,
    ) -> None:
        """Write the results so far."""
        import dataclasses

        from hvdtrain.bench.results import write_results

        given = {"suite": suite, "collectives": collectives, "parallel": parallel}
        parts = {name: value for name, value in given.items() if value is not None}
        self._results = dataclasses.replace(self._results, **parts)  # type: ignore[arg-type]
        self.path.mkdir(parents=True, exist_ok=True)
        write_results(self._results, self.path)

    def report(self) -> str:
        """Write the report and print its path."""
        from hvdtrain.bench.report import write_report

        write_report(self._results, self.path)
        return f"report      {self.path / 'report.html'}"
