"""The command line: a verb, or a recipe to train."""

import os
import sys

from hvdtrain import __version__
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.recipes.registry import RECIPES
from hvdtrain.runtime.control.agreement import installed_versions
from hvdtrain.runtime.launchers import detect_environment

VERBS = {
    "train": "hvdtrain.cli.train:main",
    "evaluate": "hvdtrain.cli.evaluate:main",
    "predict": "hvdtrain.cli.predict:main",
    "generate": "hvdtrain.cli.generate:main",
    "data": "hvdtrain.cli.data:main",
    "bench": "hvdtrain.cli.bench:main",
    "recipes": "hvdtrain.cli.recipes:main",
    "env": "hvdtrain.cli.env:main",
    "doctor": "hvdtrain.cli.doctor:main",
    "setup": "hvdtrain.cli.setup:main",
    "completion": "hvdtrain.cli.completion:main",
}
DISTRIBUTED = ("train", "evaluate", "predict", "generate", "data", "bench")

USAGE = """\
usage: python -m hvdtrain [VERB] [RECIPE] [--option value ...]      or: hvdtrain ...

Verbs:
  train [RECIPE]       train a model (the default verb; the default recipe is digits)
  evaluate RUN         evaluate a checkpoint of a run on its validation data, or on other data
  predict RUN PATH|-   predict images, rows of a table or arrays with the model of a run
  generate RUN --prompt TEXT
                       continue a text with the language model of a run
  data pack|inspect|bench
                       pack class folders into TFRecords, look at data, measure their speed
  bench                compare backends, hand-written loops and collectives, with a report
  recipes              list the recipes
  env                  print what belongs into a bug report
  doctor               check the installation, part by part
  setup                build Horovod into the active environment
  completion SHELL     print a script that completes hvdtrain in bash, zsh or fish

Several processes:
  horovodrun -np 4 python -m hvdtrain [...]
  mpirun -np 4 python -m hvdtrain [...]

"python -m hvdtrain VERB --help" shows a verb's options, --version the versions."""


def run() -> int:
    """Run the command line of this process, as the command `hvdtrain` does, and return the exit code."""
    return main(sys.argv[1:])


def main(argv: list[str]) -> int:
    """Run the verb in `argv` (default: train) and return the exit code."""
    if argv[:1] in (["--version"], ["-V"]):
        if detect_environment().rank == 0:
            print(version_line())
        return 0
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


def version_line() -> str:
    """Return the version of hvdtrain, and those of what it runs on."""
    names = {"python": "Python", "tensorflow": "TensorFlow", "keras": "Keras", "horovod": "Horovod"}
    versions = installed_versions()
    return f"hvdtrain {__version__} ({', '.join(f'{name} {versions[key]}' for key, name in names.items())})"


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
