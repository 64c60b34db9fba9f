"""`data bench`: compare the speed of the data pipeline with that of the training step."""

import sys

from hvdtrain.cli.launch import run_on_all_ranks
from hvdtrain.cli.train import Request, parse
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, digest
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session

STEPS = 50
USAGE = f"""\
usage: python -m hvdtrain data bench [RECIPE] [--steps N] [--option value ...]

Measures samples per second over all ranks, three times {STEPS} steps (--steps) each, in turn: of the data pipeline
alone, of the training step on one batch again and again, and of both together. Takes the options of `train`; writes
nothing."""


def main(argv: list[str]) -> int:
    """Run the measurement and return the exit code."""
    if {"-h", "--help"} & set(argv):
        if detect_environment().rank == 0:
            print(USAGE)
        return 0
    steps, words = STEPS, argv

    def read(files: FilesRead) -> Request:
        nonlocal steps
        steps, rest = _steps(words)
        request = parse(rest, files)
        if request.files.resume is not None or request.files.run_dir is not None:
            raise ConfigError("data bench writes nothing: leave out --run-dir and --resume.")
        return request

    return run_on_all_ranks(read, _describe, lambda session, request: _bench(session, request, steps))


def _steps(argv: list[str]) -> tuple[int, list[str]]:
    if "--steps" not in argv:
        return STEPS, argv
    place = argv.index("--steps")
    value = "".join(argv[place + 1 : place + 2])
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"--steps must be a positive number. Received: {value or 'nothing'}.")
    return int(value), argv[:place] + argv[place + 2 :]


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    return request.config.runtime, {"the configuration": digest(request.config)}


def _bench(session: Session, request: Request, steps: int) -> None:
    from hvdtrain.runs.data_bench import bench_data, verdict

    result = bench_data(session, request.config, steps=steps)
    if session.world.primary:
        for name, rate in (("pipeline", result.pipeline), ("step", result.step), ("together", result.together)):
            print(f"{name:10} {rate:12,.0f} samples/s")
        print(verdict(result))
        sys.stdout.flush()
