"""`bench --autotune`: find the fastest settings of the exchange on this machine."""

import argparse
import functools
from pathlib import Path

from hvdtrain.bench.catalog import MODELS, bench_model
from hvdtrain.cli.bench_suite import OUT, refuse_launchers
from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import ended_by_exceptions, run_here
from hvdtrain.config.errors import LaunchError

FLAG = "--autotune"
FILE = "exchange.env"

_DESCRIPTION = """\
Finds the settings of the exchange that are fastest on this machine (MPI's yielding, Horovod's cycle time and fusion
buffer): tries one after the other in launches of a few steps, and compares what it found with the defaults in turn.
Writes them into OUT/exchange.env, to source before training. Nothing else may run on the machine meanwhile.
"""


def main(argv: list[str]) -> int:
    """Run the autotuning and return the exit code: 1 if other programs disturbed it."""
    with ended_by_exceptions():
        return run_here(lambda: _parser().parse_args(argv), _tune)


def _parser() -> Parser:
    parser = Parser(
        f"bench {FLAG}",
        description=_DESCRIPTION,
    )
    parser.add_argument("--backend", choices=("horovod-mpi", "horovod-gloo"), default="horovod-mpi")
    parser.add_argument("--model", choices=tuple(MODELS), default="mlp_deep", help="whose steps are timed (mlp_deep)")
    parser.add_argument("--batch", type=positive, help="samples per step over all ranks, in place of the model's own")
    parser.add_argument("--ranks", type=positive, help="ranks; as many as there are cores by default")
    parser.add_argument("--cores", type=positive, default=1, help="cores of each rank (1)")
    parser.add_argument("--steps", type=positive, help="steps of a window; by default the model's own")
    parser.add_argument("--windows", type=positive, default=3, help="windows of a launch (3)")
    parser.add_argument("--limit", type=positive, default=300, help="seconds that a launch may take (300)")
    parser.add_argument("--out", type=Path, default=Path(OUT), help=f"where exchange.env is written ({OUT})")
    return parser


def _tune(arguments: argparse.Namespace) -> int:
    refuse_launchers()
    from hvdtrain.bench.autotune import autotune, shown
    from hvdtrain.bench.host import default_ranks
    from hvdtrain.bench.launching import LaunchFailed, ask
    from hvdtrain.bench.plan import Point
    from hvdtrain.bench.suite import Launching
    from hvdtrain.bench.timing import WORD

    ranks = arguments.ranks or max(default_ranks(arguments.cores))
    batch = arguments.batch or bench_model(arguments.model).config.data.batch
    if batch % ranks:
        raise LaunchError(f"A batch of {batch} samples does not divide among {ranks} ranks. Use --batch or --ranks.")
    point = Point(arguments.backend, arguments.model, ranks, batch)
    how = Launching(windows=arguments.windows, warm_up=1, steps=arguments.steps, cores=arguments.cores, breakdown=False)
    log = functools.partial(print, flush=True)
    log(f"{arguments.model} on {ranks} ranks, {batch} samples a step")
    try:
        found = autotune(
            point, how, lambda command, settings: ask(command, WORD, limit_s=arguments.limit, settings=settings), log
        )
    except LaunchFailed as error:
        raise LaunchError(f"{arguments.backend} could not be timed: {error}") from error
    if found.noise is not None:
        log(f"too noisy    other programs took {found.noise:.2f} cores meanwhile: nothing was written")
        return 1
    if not found.settings:
        log("the defaults are as fast as anything that was tried")
        return 0
    file = arguments.out / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f"# python -m hvdtrain bench {FLAG}: {arguments.model} on {ranks} ranks, {arguments.backend};",
        f"# a step took {found.saved:.0%} less time than with the defaults.",
        f"export {shown(found.settings)}",
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    log(f"{found.saved:.0%} less time a step with {shown(found.settings)}")
    log(f"to train so  source {file}")
    return 0
