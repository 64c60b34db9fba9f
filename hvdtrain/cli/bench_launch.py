"""`bench side`, `engine` and `layout`: one launch of a comparison, whose figures rank 0 prints as JSON."""

import argparse
from dataclasses import dataclass
from typing import Any, get_args

from hvdtrain.bench.collectives import ENGINES, parsed_size
from hvdtrain.bench.engine import say
from hvdtrain.bench.suite import MODELS, SIDES, bench_config
from hvdtrain.bench.timing import ServedProcesses, Timing, limit_cores
from hvdtrain.cli.parser import Parser, shows_help
from hvdtrain.cli.running import run_linked, run_on_all_ranks
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.files import FilesRead, apply_values, digest
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import MallocName, RuntimeConfig
from hvdtrain.runtime.failures import show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.link import Link
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.startup import import_tensorflow

# -- a side --


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    timing: Timing


def side(argv: list[str]) -> int:
    """Measure one side and return the exit code."""
    if shows_help(_side_parser(), argv):
        return 0
    if argv and argv[0] in SIDES and SIDES[argv[0]].by_hand:
        return _by_hand(argv)
    return run_on_all_ranks(lambda files: parse_side(argv), _describe, _trained, ServedProcesses)


def _side_parser() -> Parser:
    parser = Parser(
        "bench side",
        description="Measures one side of the comparison in these processes and prints its figures as JSON. bench "
        "starts it, under a launcher where the side has several processes; its reports show the whole command.",
    )
    add = parser.add_argument
    add("side", choices=tuple(SIDES))
    add("model", choices=tuple(MODELS))
    add("--batch", type=int, required=True, help="samples per optimizer step over all ranks")
    add("--ranks", type=int, default=1, help="replicas, over all processes")
    add("--precision", default="float32")
    add("--accumulate", type=int, default=1)
    add("--cores", type=int, default=1, help="cores of each rank")
    add("--steps", type=int, help="steps of a window; by default the model's own")
    add("--windows", type=int, default=5)
    add("--warm-up", type=int, default=2, help="windows that are not counted")
    add("--malloc", choices=get_args(MallocName), default=RuntimeConfig.malloc)
    add("--breakdown", action="store_true", help="find out where a step's time goes")
    return parser


def parse_side(argv: list[str]) -> Request:
    """Parse the command line, and limit this process to its cores before the ranks divide them.

    Raises:
        UserError: a mistake in it, or a backend that this hvdtrain lacks.
    """
    words = _side_parser().parse_args(argv)
    this = SIDES[words.side]
    config = bench_config(words.model, batch=words.batch, precision=words.precision, accumulate=words.accumulate)
    timing = Timing(words.steps or MODELS[words.model].steps, words.windows, words.warm_up, words.breakdown)
    runtime: dict[str, Any] = {"malloc": words.malloc}
    if not this.by_hand:
        runtime["backend"] = this.backend
    if this.several:
        runtime["replicas"] = words.ranks
    config = apply_values(config, {"runtime": runtime}, f"--backend {this.backend}")
    limit_cores(words.cores * words.ranks)
    return Request(config, timing)


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    return request.config.processes, {"the configuration": digest(request.config)}


def _trained(session: Session, request: Request) -> None:
    from hvdtrain.bench.trained import measure

    figures, facts = measure(session, request.config, request.timing)
    if session.world.primary:
        say(figures, **facts)


def _by_hand(argv: list[str]) -> int:
    """Measure a hand-written loop, without hvdtrain's session and settings."""
    environment = detect_environment()
    try:
        request = parse_side(argv)
        import_tensorflow()
        from hvdtrain.bench.plain import measure

        figures, facts = measure(request.config, request.timing, environment)
    except (UserError, KeyboardInterrupt) as error:
        return show_failure(environment, error, wording=on_command_line)
    if environment.rank == 0:
        say(figures, **facts)
    return 0


# -- an engine of collectives --


def engine(argv: list[str]) -> int:
    """Measure one engine's collectives and return the exit code."""
    if shows_help(_engine_parser(), argv):
        return 0
    return run_linked(lambda files: _engine_parser().parse_args(argv), _called)


def _engine_parser() -> Parser:
    parser = Parser(
        "bench engine",
        description="Times the collectives of one engine on the ranks that a launcher has started, and prints "
        "milliseconds a call as JSON. bench collectives starts it; its reports show the whole command.",
    )
    parser.add_argument("engine", choices=tuple(ENGINES))
    parser.add_argument("--collectives", nargs="+", required=True)
    parser.add_argument("--sizes", nargs="+", type=parsed_size, required=True, help="1KB 4MB …")
    return parser


def _called(link: Link, words: argparse.Namespace) -> None:
    from hvdtrain.bench import callers

    caller: callers.Caller = getattr(callers, ENGINES[words.engine].code)(link)
    times, unavailable = callers.measure(caller, link, words.collectives, words.sizes)
    if link.environment.rank == 0:
        say({"ms": times}, settings=caller.settings, unavailable=unavailable)
    link.control.barrier(60.0)
    caller.close()
    link.close()


# -- a layout of ranks --

_LAYOUT_USAGE = """\
usage: python -m hvdtrain bench layout [RECIPE] [--cores CORES] [--steps STEPS] [--windows WINDOWS] [--option value ...]

Trains a recipe with options of "python -m hvdtrain train" on the first CORES cores, for WINDOWS windows of STEPS steps,
and prints the figures of `bench side`. The reports of bench --parallel, which starts it, show the whole command.
"""


def layout(argv: list[str]) -> int:
    """Measure one layout of ranks and return the exit code."""
    if not argv or {"-h", "--help"} & set(argv):
        if detect_environment().rank == 0:
            print(_LAYOUT_USAGE, end="")
        return 0 if argv else 2
    return run_on_all_ranks(lambda files: parse_layout(argv, files), _describe, _trained)


def parse_layout(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse the command line, and limit this process to its cores.

    Raises:
        UserError: a mistake in it.
    """
    from hvdtrain.cli.train import parse

    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, default in (("--cores", None), ("--steps", 5), ("--windows", 4)):
        own.add_argument(name, type=int, default=default)
    words, rest = own.parse_known_args(argv)
    config = parse(rest, files).config
    if words.cores is not None:
        limit_cores(words.cores)
    return Request(config, Timing(words.steps, words.windows))
