"""`supervise`: start a job again after it has failed."""

import argparse

from hvdtrain.cli.launch import positive
from hvdtrain.cli.local import run_here
from hvdtrain.config.errors import ConfigError
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.supervisor import Supervisor


def main(argv: list[str]) -> int:
    """Run the command in `argv` until it succeeds, and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m hvdtrain supervise",
        usage="%(prog)s [--max-restarts N] -- LAUNCHER COMMAND ...",
        description="Run a job, and start its ranks again after a failure. The job itself has to go on "
        "from its last checkpoint.",
    )
    parser.add_argument("--max-restarts", type=positive, default=3, metavar="N", help="restarts in all (default: 3)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)

    def parse() -> Supervisor:
        request = parser.parse_args(argv)
        command = request.command[1:] if request.command[:1] == ["--"] else request.command
        launcher = detect_environment().launcher
        if launcher != "none":
            raise ConfigError(
                f"supervise starts the launcher. Received: a start by {launcher}. Put supervise before it."
            )
        if not command:
            raise ConfigError(
                "supervise needs the command that starts the ranks, after `--`: "
                "python -m hvdtrain supervise -- horovodrun -np 2 python train.py"
            )
        return Supervisor(command, request.max_restarts)

    return run_here(parse, Supervisor.run)
