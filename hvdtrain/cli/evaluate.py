"""`evaluate`: evaluate the newest checkpoint of a run on its validation data."""

import argparse
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from hvdtrain.cli.launch import parse_errors_as_user_errors, run_on_all_ranks
from hvdtrain.config.files import digest
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import BackendName, RuntimeConfig
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    run_dir: Path


def main(argv: list[str]) -> int:
    """Evaluate a run and return the exit code."""
    if {"-h", "--help"} & set(argv):
        if detect_environment().rank == 0:
            _parser().print_help()
        return 0
    return run_on_all_ranks(lambda: parse(argv), _describe, _evaluate)


def parse(argv: list[str]) -> Request:
    """Parse `RUN_DIR [--backend NAME] [--replicas N]`.

    Raises:
        UserError: a wrong option, or no run in that folder.
    """
    from hvdtrain.runs.folder import opened

    with parse_errors_as_user_errors():
        arguments = _parser().parse_args(argv)
    _, config = opened(arguments.run_dir, "evaluate")
    # The runtime options of the training do not apply to this machine.
    return Request(replace(config, runtime=RuntimeConfig(arguments.backend, arguments.replicas)), arguments.run_dir)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m hvdtrain evaluate", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="folder of the run")
    parser.add_argument("--backend", choices=get_args(BackendName), default="auto")
    parser.add_argument("--replicas", type=int, default=None)
    return parser


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    return request.config.runtime, {"the configuration": digest(request.config), "RUN_DIR": str(request.run_dir)}


def _evaluate(session: Session, request: Request) -> None:
    from hvdtrain.runs.folder import RunFolder
    from hvdtrain.runs.run import evaluate, left_out_line

    folder = RunFolder(request.run_dir)
    figures = evaluate(session, request.config, folder)
    if session.world.primary:
        message = left_out_line(figures.get("left_out", []), folder.evaluation.name)
        print(f"{message}\n{_line(figures)}" if message else _line(figures), flush=True)


def _line(figures: dict[str, Any]) -> str:
    values = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name.startswith("val_"))
    return f"step {figures['step']}  {values}"
