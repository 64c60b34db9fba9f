"""Verbs that have commands, such as `data pack`."""

import sys
from collections.abc import Mapping

from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.runtime.launchers import detect_environment


def run_command(verb: str, argv: list[str], commands: Mapping[str, str], usage: str) -> int:
    """Run the command of `verb` that `argv` begins with, and return its exit code: 2 where there is no such command.

    Args:
        verb: as it is typed.
        argv: what follows it.
        commands: `module:function` by name; the function takes what follows the name.
        usage: printed without a command, and for help.
    """
    if argv and argv[0] in commands:
        code: int = resolve(f"command of {verb}", argv[0], commands)(argv[1:])
        return code
    asked = not argv or argv[0] in ("-h", "--help", "help")
    if detect_environment().rank == 0:
        if asked:
            print(usage)
        else:
            error = UserError(f"{verb} has no command {argv[0]!r}.{suggestion(argv[0], commands)}")
            print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
    return 0 if asked else 2
