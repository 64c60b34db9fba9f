"""`data`: prepare and inspect data before training."""

import sys

from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.runtime.launchers import detect_environment

COMMANDS = {
    "bench": "hvdtrain.cli.data_bench:main",
    "inspect": "hvdtrain.cli.data_inspect:main",
    "pack": "hvdtrain.cli.data_pack:main",
    "serve": "hvdtrain.cli.data_serve:main",
}

USAGE = """\
usage: python -m hvdtrain data COMMAND ...

Commands:
  pack SRC DEST        make TFRecord shards of a folder (or tar file) of class folders of images
  inspect PATH         show what data hold, and what of it is damaged
  bench [RECIPE]       measure how fast the data come, against how fast the step takes them
  serve --port N       read and decode for the ranks of jobs with --data-service grpc://HOST:N

"python -m hvdtrain data COMMAND --help" shows the options of a command."""


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code: 1 for damaged data, 2 for a mistake."""
    if argv and argv[0] in COMMANDS:
        code: int = resolve("command of data", argv[0], COMMANDS)(argv[1:])
        return code
    asked = not argv or argv[0] in ("-h", "--help", "help")
    if detect_environment().rank == 0:
        if asked:
            print(USAGE)
        else:
            error = UserError(f"data has no command {argv[0]!r}.{suggestion(argv[0], COMMANDS)}")
            print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
    return 0 if asked else 2
