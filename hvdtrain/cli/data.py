"""`data`: prepare data before training."""

from hvdtrain.cli.commands import run_command

COMMANDS = {
    "pack": "hvdtrain.cli.data_pack:main",
}

USAGE = """\
usage: python -m hvdtrain data COMMAND ...

Commands:
  pack SRC DEST        make TFRecord shards of a folder (or tar file) of class folders of images

"python -m hvdtrain data COMMAND --help" shows the options of a command."""


def main(argv: list[str]) -> int:
    """Run the subcommand in `argv` and return the exit code, 2 for a mistake."""
    return run_command("data", argv, COMMANDS, USAGE)
