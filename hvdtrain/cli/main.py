"""The command line: a verb, or a recipe to train."""

import os
import sys

from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.recipes.registry import RECIPES
from hvdtrain.runtime.launchers import detect_environment

VERBS = {
    "train": "hvdtrain.cli.train:main",
    "evaluate": "hvdtrain.cli.evaluate:main",
    "data": "hvdtrain.cli.data:main",
    "bench": "hvdtrain.cli.bench:main",
    "recipes": "hvdtrain.cli.recipes:main",
    "env": "hvdtrain.cli.env:main",
    "doctor": "hvdtrain.cli.doctor:main",
}
DISTRIBUTED = ("train", "evaluate", "data", "bench")

USAGE = """\
usage: python -m hvdtrain [VERB] [RECIPE] [--option value ...]

Verbs:
  train [RECIPE]       train a model (the default verb; the default recipe is digits)
  evaluate RUN_DIR     evaluate the newest checkpoint of a run on its validation data
  data pack|inspect|bench
                       pack class folders into TFRecords, look at data, measure their speed
  bench                compare backends, hand-written loops and collectives, with a report
  recipes              list the recipes
  env                  print what belongs into a bug report
  doctor               check the installation, part by part

Several processes:
  horovodrun -np 4 python -m hvdtrain [...]
  mpirun -np 4 python -m hvdtrain [...]

"python -m hvdtrain VERB --help" shows the options of a verb."""


def main(argv: list[str]) -> int:
    """Run the verb in `argv` (default: train) and return the exit code."""
    verb, rest = _split(argv)
    if verb is None:
        # Every rank would print the same.
        if detect_environment().rank == 0:
            print(USAGE)
        return 0
    if verb not in VERBS:
        return _refuse(verb)
    if verb not in DISTRIBUTED and detect_environment().rank > 0:
        return 0
    try:
        code: int = resolve("verb", verb, VERBS)(rest)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the pipe has gone; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _split(argv: list[str]) -> tuple[str | None, list[str]]:
    """Return the verb and its arguments; None if help is requested."""
    if argv and argv[0] in ("-h", "--help", "help"):
        return None, []
    if argv and argv[0] in VERBS:
        return argv[0], argv[1:]
    if not argv or argv[0].startswith("-") or argv[0] in RECIPES:
        return "train", argv
    return argv[0], argv[1:]


def _refuse(word: str) -> int:
    if detect_environment().rank == 0:
        error = UserError(f"There is no verb or recipe {word!r}.{suggestion(word, {**VERBS, **RECIPES})}")
        print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
    return 2
