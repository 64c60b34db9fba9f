"""`data`: prepare and inspect data before training."""

from hvdtrain.cli.commands import run_command

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
    return run_command("data", argv, COMMANDS, USAGE)
