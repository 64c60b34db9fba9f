"""`checkpoint`: list, verify and export the checkpoints of a run or of a script."""

from hvdtrain.cli.commands import run_command

COMMANDS = {
    "list": "hvdtrain.cli.checkpoint_list:list_main",
    "verify": "hvdtrain.cli.checkpoint_list:verify_main",
    "export": "hvdtrain.cli.checkpoint_export:main",
}

USAGE = """\
usage: python -m hvdtrain checkpoint COMMAND DIR ...

Commands:
  list DIR             show the checkpoints: step, epoch, time, size, and which is the best
  verify DIR           read every byte of them, and compare it with its SHA-256
  export DIR           write the model of one as a file that Keras or NumPy loads

DIR is the folder of a run, a folder of checkpoints, or a single checkpoint.
"python -m hvdtrain checkpoint COMMAND --help" shows the options of a command."""


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code: 1 for a damaged checkpoint, 2 for a mistake."""
    return run_command("checkpoint", argv, COMMANDS, USAGE)
