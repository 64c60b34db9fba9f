"""`bench side`: one launch of one side, as the suite starts it."""

from dataclasses import dataclass
from typing import Any, get_args

from hvdtrain.bench.catalog import MODELS, bench_config, bench_model
from hvdtrain.bench.served import ServedProcesses
from hvdtrain.bench.sides import SIDES, Side
from hvdtrain.bench.timing import Timing, limit_cores, say
from hvdtrain.cli.parser import Parser, shows_help
from hvdtrain.cli.running import run_on_all_ranks
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.files import apply_values, digest
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import MallocName, RuntimeConfig
from hvdtrain.runtime.failures import show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session
from hvdtrain.runtime.startup import import_tensorflow

_DESCRIPTION = """\
Measures one side of the comparison in these processes and prints its figures as JSON. bench starts it, under a launcher
where the side has several processes; its reports show the whole command.
"""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    side: Side
    config: Config
    timing: Timing
    cores: int


def main(argv: list[str]) -> int:
    """Measure one side and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    if argv and argv[0] in SIDES and SIDES[argv[0]].by_hand:
        return _by_hand(argv)
    return run_on_all_ranks(lambda files: parse(argv), _describe, _trained, ServedProcesses)


def parse(argv: list[str]) -> Request:
    """Parse the command line, and limit this process to its cores before the ranks divide them.

    Raises:
        UserError: a mistake in it, or a backend that this hvdtrain lacks.
    """
    words = _parser().parse_args(argv)
    this = SIDES[words.side]
    config = bench_config(words.model, batch=words.batch, precision=words.precision, accumulate=words.accumulate)
    timing = Timing(words.steps or bench_model(words.model).steps, words.windows, words.warm_up, words.breakdown)
    runtime: dict[str, Any] = {"malloc": words.malloc}
    if not this.by_hand:
        runtime["backend"] = this.backend
    if this.several:
        runtime["replicas"] = words.ranks
    config = apply_values(config, {"runtime": runtime}, f"--backend {this.backend}")
    limit_cores(words.cores * words.ranks)
    return Request(this, config, timing, words.cores)


def _parser() -> Parser:
    parser = Parser("bench side", description=_DESCRIPTION)
    parser.add_argument("side", choices=tuple(SIDES))
    parser.add_argument("model", choices=tuple(MODELS))
    parser.add_argument("--batch", type=int, required=True, help="samples per optimizer step over all ranks")
    parser.add_argument("--ranks", type=int, default=1, help="replicas, over all processes")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--cores", type=int, default=1, help="cores of each rank")
    parser.add_argument("--steps", type=int, help="steps of a window; by default the model's own")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=2, help="windows that are not counted")
    parser.add_argument("--malloc", choices=get_args(MallocName), default=RuntimeConfig.malloc)
    parser.add_argument("--breakdown", action="store_true", help="find out where a step's time goes")
    return parser


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    return request.config.processes, {"the configuration": digest(request.config)}


def _trained(session: Session, request: Request) -> None:
    from hvdtrain.bench.trained import measure

    answer = measure(session, request.config, request.timing)
    if session.world.primary:
        say(answer)


def _by_hand(argv: list[str]) -> int:
    """Measure a hand-written loop, without hvdtrain's session and settings."""
    environment = detect_environment()
    try:
        request = parse(argv)
        import_tensorflow()
        from hvdtrain.bench.plain import measure

        answer = measure(request.config, request.timing, environment)
    except (UserError, KeyboardInterrupt) as error:
        return show_failure(environment, error, wording=on_command_line)
    if environment.rank == 0:
        say(answer)
    return 0
