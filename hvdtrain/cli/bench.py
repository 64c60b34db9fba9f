"""`bench`: compare backends, hand-written loops and collectives."""

import sys

from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.runtime.launchers import detect_environment

COMMANDS = {
    "collectives": "hvdtrain.cli.bench_collectives:main",
    "compare": "hvdtrain.cli.bench_compare:main",
    "engine": "hvdtrain.cli.bench_engine:main",
    "layout": "hvdtrain.cli.bench_layout:main",
    "report": "hvdtrain.cli.bench_report:main",
    "side": "hvdtrain.cli.bench_side:main",
}


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv`, by default the comparison of training steps, and return the exit code."""
    if "--autotune" in argv and argv[0].startswith("-"):
        from hvdtrain.cli.bench_autotune import main as autotune

        return autotune([word for word in argv if word != "--autotune"])
    if "--parallel" in argv and argv[0].startswith("-"):
        from hvdtrain.cli.bench_parallel import main as parallel

        return parallel([word for word in argv if word != "--parallel"])
    if not argv or argv[0].startswith("-"):
        from hvdtrain.cli.bench_suite import main as suite

        return suite(argv)
    if argv[0] in COMMANDS:
        code: int = resolve("command of bench", argv[0], COMMANDS)(argv[1:])
        return code
    if detect_environment().rank == 0:
        error = UserError(f"bench has no command {argv[0]!r}.{suggestion(argv[0], COMMANDS)}")
        print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
    return 2
