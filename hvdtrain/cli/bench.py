"""`bench`: compare backends, hand-written loops, collectives and layouts of ranks, and tune the exchange."""

import argparse
import functools
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

from hvdtrain.bench import autotune, collectives, layouts
from hvdtrain.bench.engine import Job, LaunchFailed, launch, measure
from hvdtrain.bench.report import check_packages, compared, render, write_report
from hvdtrain.bench.results import Comparison, Folder, Run, read_results
from hvdtrain.bench.suite import (
    MODELS,
    SIDES,
    USUAL_MODELS,
    USUAL_SIDES,
    Point,
    chosen,
    job_of,
    points,
)
from hvdtrain.cli.parser import Parser, positive
from hvdtrain.cli.running import ended_by_exceptions, refuse_word, run_here
from hvdtrain.config.errors import LaunchError
from hvdtrain.config.registry import resolve
from hvdtrain.config.runtime import MallocName, RuntimeConfig
from hvdtrain.config.training import PrecisionName
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.tuning import CYCLE_TIME

OUT = Path("bench")
EXCHANGE_FILE = "exchange.env"
SIZES = ("1KB", "64KB", "1MB", "16MB", "100MB", "400MB")
LAUNCHED = {
    "engine": "hvdtrain.cli.bench_launch:engine",
    "layout": "hvdtrain.cli.bench_launch:layout",
    "side": "hvdtrain.cli.bench_launch:side",
}
"""Commands that one launch of a comparison consists of."""

_log = functools.partial(print, flush=True)


def main(argv: list[str]) -> int:
    """Run the command in `argv`, by default the comparison of training steps, and return the exit code."""
    if argv and argv[0] in LAUNCHED:
        code: int = resolve("command of bench", argv[0], LAUNCHED)(argv[1:])
        return code
    name, words = "", argv
    if argv and not argv[0].startswith("-"):
        name, words = argv[0], argv[1:]
    else:
        for flag in ("--autotune", "--parallel"):
            if flag in argv:
                name, words = flag, [word for word in argv if word != flag]
    if name not in COMMANDS:
        return refuse_word(f"bench has no command {name!r}.", name, [*COMMANDS, *LAUNCHED])
    parser, action = COMMANDS[name]
    with ended_by_exceptions():
        return run_here(lambda: parser().parse_args(words), lambda options: action(options, argv))


def _compare_sides(jobs: Sequence[Job], options: argparse.Namespace, kind: str, argv: Sequence[str]) -> int:
    """Measure all jobs, write results and report, and return the exit code: 1 if nothing could be measured."""
    folder = Folder(options.out, kind)
    count = options.rounds * sum(job.skipped is None for job in jobs)
    _log(f"{len(jobs)} runs, {options.rounds} rounds, {count} launches; {folder.path}")
    runs = measure(
        jobs,
        options.rounds,
        functools.partial(launch, limit_s=options.limit),
        log=_log,
        keep=lambda runs: folder.keep(_comparison(options, argv, runs)),
    )
    _log(write_report(folder.results, folder.path))
    return 0 if any(run.rounds for run in runs) else 1


def _comparison(options: argparse.Namespace, argv: Sequence[str], runs: list[Run]) -> Comparison:
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    return Comparison(shlex.join(["python", "-m", "hvdtrain", "bench", *argv]), settings, runs)


def _ready() -> None:
    """Refuse to run under a launcher, since bench starts ranks itself, or without what a report needs."""
    environment = detect_environment()
    if environment.launcher != "none":
        raise LaunchError(f"bench starts its ranks itself: start it without {environment.launcher}.")
    check_packages("bench")


def _measuring_parser(command: str, description: str, *, rounds: int | None, limit: int, **more: Any) -> Parser:
    """Return a parser with the options of everything that is launched."""
    parser = Parser(f"bench {command}".rstrip(), description=description, **more)
    if rounds is not None:
        parser.add_argument("--rounds", type=positive, default=rounds, help=f"launches of each ({rounds})")
    parser.add_argument("--limit", type=positive, default=limit, help=f"seconds that a launch may take ({limit})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"the report goes to OUT/DATE-HOST ({OUT})")
    return parser


def _listed(about: dict[str, str]) -> str:
    width = max(map(len, about)) + 2
    return "\n".join(f"  {name:<{width}}{text}" for name, text in about.items())


def default_ranks(cores_per_rank: int) -> list[int]:
    """Return 2, 4, 8 … ranks, as many as have cores of their own; at least 2."""
    room = len(os.sched_getaffinity(0)) // cores_per_rank
    return [2**power for power in range(1, 12) if 2**power <= max(2, room)]


# -- training steps --

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


def _suite_parser() -> Parser:
    models, sides = (_listed({name: one.about for name, one in some.items()}) for some in (MODELS, SIDES))
    parser = _measuring_parser(
        "",
        "Compares steps of training: backends, models, ranks, precisions and accumulation, all sides in turn, each "
        "launch in fresh processes. Writes results.json, report.md and report.html into OUT/DATE-HOST. One process on "
        "the cores of one rank (one-core) always takes part: it is what efficiencies are shares of.",
        rounds=5,
        limit=900,
        epilog=f"backends:\n{sides}\n\nmodels:\n{models}\n\n{_COMMANDS}",
    )
    add = parser.add_argument
    add("--backends", nargs="+", metavar="NAME", default=list(USUAL_SIDES), help=" ".join(USUAL_SIDES))
    add("--models", nargs="+", metavar="NAME", default=list(USUAL_MODELS), help=" ".join(USUAL_MODELS))
    add("--ranks", nargs="+", type=positive, help="2, 4, 8 … up to the cores by default")
    add("--precisions", nargs="+", choices=get_args(PrecisionName), default=["float32"])
    microbatches = "microbatches of a rank; the batch grows with them, and a microbatch stays as it is"
    add("--accumulate", nargs="+", type=positive, default=[1], help=microbatches)
    scaling = "the batch of a step stays as it is for any number of ranks; or that of a rank does"
    add("--scaling", nargs="+", choices=("strong", "weak"), default=["strong", "weak"], help=scaling)
    add("--batch", type=positive, help="samples per step over all ranks, in place of the models' own")
    add("--baseline", default="plain-mpi", help="whose time the others' are divided by (plain-mpi)")
    add("--windows", type=positive, default=5, help="windows of steps in a launch (5)")
    add("--warm-up", type=positive, default=2, help="windows before them that are not counted (2)")
    add("--steps", type=positive, help="steps of a window; by default the model's own")
    add("--cores", type=positive, default=1, help="cores of each rank (1)")
    malloc = f"memory allocator of all sides, the hand-written loops included ({RuntimeConfig.malloc})"
    add("--malloc", choices=get_args(MallocName), default=RuntimeConfig.malloc, help=malloc)
    add("--no-breakdown", action="store_true", help="leave out the parts of a step")
    return parser


def _suite(options: argparse.Namespace, argv: Sequence[str]) -> int:
    _ready()
    chosen("backend", options.baseline, SIDES)
    options.ranks = options.ranks or default_ranks(options.cores)
    found = points(
        sides=options.backends,
        models=options.models,
        ranks=options.ranks,
        precisions=options.precisions,
        accumulations=options.accumulate,
        scalings=options.scaling,
        batch=options.batch,
    )
    job = functools.partial(
        job_of,
        windows=options.windows,
        warm_up=options.warm_up,
        steps=options.steps,
        cores=options.cores,
        breakdown=not options.no_breakdown,
        malloc=options.malloc,
    )
    return _compare_sides([job(point) for point in found], options, "suite", argv)


# -- collectives --


def _collectives_parser() -> Parser:
    parser = _measuring_parser(
        "collectives",
        "Times collectives over sizes, all engines in turn, each launch in fresh processes, beside what the host's "
        "memory allows. Reports latency, algorithm and bus bandwidth as nccl-tests defines them. At 400 MB a rank "
        "takes up to 2 GB of memory.",
        rounds=5,
        limit=900,
        epilog="engines:\n" + _listed({name: one.about for name, one in collectives.ENGINES.items()}),
    )
    add, every = parser.add_argument, collectives.COLLECTIVES
    add("--engines", nargs="+", metavar="NAME", default=list(collectives.ENGINES), help="all by default")
    add("--collectives", nargs="+", choices=every, default=list(every))
    add("--sizes", nargs="+", type=_size, default=list(map(collectives.parsed_size, SIZES)), help=" ".join(SIZES))
    add("--ranks", type=positive, default=2, help="ranks (2)")
    return parser


def _size(text: str) -> int:
    try:
        return collectives.parsed_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a size of at least 1KB: 64KB, 1MB. Received: {text}.") from None


def _collectives(options: argparse.Namespace, argv: Sequence[str]) -> int:
    _ready()
    sizes = sorted(options.sizes)
    jobs = [
        collectives.job_of(name, options.collectives, sizes, options.ranks) for name in dict.fromkeys(options.engines)
    ]
    return _compare_sides(jobs, options, "collectives", argv)


# -- layouts of ranks --


def _parallel_parser() -> Parser:
    models = _listed({name: one.about for name, one in layouts.MODELS.items()})
    names = _listed({name: " ".join(options) for name, options in layouts.layouts(4).items()})
    parser = _measuring_parser(
        "--parallel",
        "Compares layouts of ranks for a transformer: ZeRO, tensor, sequence and pipeline parallelism and some of them "
        "together, beside data parallelism. Reports the time of a step, the peak of memory, and the bytes on the wire "
        "by formula and, over Gloo, as counted. Writes results.json, report.md and report.html into OUT/DATE-HOST.",
        rounds=3,
        limit=900,
        epilog=f"models:\n{models}\n\nlayouts, as of 4 ranks:\n{names}",
    )
    add = parser.add_argument
    add("--model", choices=tuple(layouts.MODELS), default="lm")
    add("--layouts", nargs="+", metavar="LAYOUT", help=f"all; {', '.join(layouts.ALWAYS)} always take part")
    add("--ranks", nargs="+", type=_several, default=[2], help="numbers of ranks (2)")
    add("--controllers", nargs="+", choices=("mpi", "gloo"), default=["mpi", "gloo"])
    add("--steps", type=positive, default=30, help="steps of a launch (30)")
    return parser


def _several(text: str) -> int:
    if int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2. Received: {text}.")
    return int(text)


def _parallel(options: argparse.Namespace, argv: Sequence[str]) -> int:
    _ready()
    jobs = [
        layouts.job_of(name, model=options.model, controller=controller, ranks=ranks, steps=options.steps)
        for controller in options.controllers
        for ranks in options.ranks
        for name in dict.fromkeys([*layouts.ALWAYS, *(options.layouts or layouts.layouts(ranks))])
    ]
    return _compare_sides(jobs, options, "parallel", argv)


# -- autotuning --


def _autotune_parser() -> Parser:
    parser = _measuring_parser(
        "--autotune",
        "Finds the settings of the exchange that are fastest on this machine (MPI's yielding, Horovod's cycle time and "
        "fusion buffer): tries one after the other in launches of a few steps, and compares what it found with the "
        "defaults in turn. Writes them into OUT/exchange.env, to source before training, and a report into "
        "OUT/DATE-HOST. Nothing else may run on the machine meanwhile.",
        rounds=None,
        limit=300,
    )
    add = parser.add_argument
    add("--backend", choices=("horovod-mpi", "horovod-gloo"), default="horovod-mpi")
    add("--model", choices=tuple(MODELS), default="mlp_deep", help="whose steps are timed (mlp_deep)")
    add("--batch", type=positive, help="samples per step over all ranks, in place of the model's own")
    add("--ranks", type=positive, help="ranks; as many as there are cores by default")
    add("--cores", type=positive, default=1, help="cores of each rank (1)")
    add("--steps", type=positive, help="steps of a window; by default the model's own")
    add("--windows", type=positive, default=3, help="windows of a launch (3)")
    return parser


def _autotune(options: argparse.Namespace, argv: Sequence[str]) -> int:
    _ready()
    ranks = options.ranks or max(default_ranks(options.cores))
    batch = options.batch or MODELS[options.model].data.batch
    if batch % ranks:
        raise LaunchError(f"A batch of {batch} samples does not divide among {ranks} ranks. Use --batch or --ranks.")
    point, cores = Point(options.backend, options.model, ranks, batch), options.cores
    job = job_of(point, windows=options.windows, warm_up=1, steps=options.steps, cores=cores, breakdown=False)
    _log(f"{options.model} on {ranks} ranks, {batch} samples a step")
    os.environ.pop(CYCLE_TIME, None)  # by default there is none, and launches take what is set here
    try:
        launched = functools.partial(launch, limit_s=options.limit)
        found = autotune.autotune(job, launched, _log, mpi=SIDES[options.backend].launcher == "mpirun")
    except LaunchFailed as error:
        raise LaunchError(f"{options.backend} could not be timed: {error}") from error
    folder = Folder(options.out, "autotune")
    folder.keep(_comparison(options, argv, found.runs))
    _log(write_report(folder.results, folder.path))
    if found.noise is not None:
        _log(f"too noisy    other programs took {found.noise:.2f} cores meanwhile: no settings were written")
        return 1
    if not found.settings:
        _log("the defaults are as fast as anything that was tried")
        return 0
    file, settings = options.out / EXCHANGE_FILE, autotune.shown(found.settings)
    lines = [
        f"# python -m hvdtrain bench --autotune: {options.model} on {ranks} ranks, {options.backend};",
        f"# a step took {found.saved:.0%} less time than with the defaults.",
        f"export {settings}",
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    _log(f"{found.saved:.0%} less time a step with {settings}")
    _log(f"to train so  source {file}")
    return 0


# -- results that are there --


def _compare_parser() -> Parser:
    parser = Parser(
        "bench compare",
        description="Prints, as Markdown, what changed between two results of bench or of a script in benchmarks/: "
        "times, versions and settings.",
    )
    parser.add_argument("before", type=Path, metavar="A", help="folder of results, or its results.json")
    parser.add_argument("after", type=Path, metavar="B", help="the other one")
    return parser


def _compare(options: argparse.Namespace, argv: Sequence[str]) -> int:
    check_packages("bench compare")
    print(render(list(compared(read_results(options.before), read_results(options.after))), "md"), end="")
    return 0


def _report_parser() -> Parser:
    parser = Parser(
        "bench report",
        description="Writes report.md and report.html from the results.json of a folder; a comparison that was "
        "interrupted leaves one, too.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder of results")
    return parser


def _report(options: argparse.Namespace, argv: Sequence[str]) -> int:
    check_packages("bench report")
    print(write_report(read_results(options.folder), options.folder))
    return 0


COMMANDS: dict[str, tuple[Callable[[], Parser], Callable[[argparse.Namespace, Sequence[str]], int]]] = {
    "": (_suite_parser, _suite),
    "--autotune": (_autotune_parser, _autotune),
    "--parallel": (_parallel_parser, _parallel),
    "collectives": (_collectives_parser, _collectives),
    "compare": (_compare_parser, _compare),
    "report": (_report_parser, _report),
}
"""A parser and an action by the word or flag that chooses them."""
