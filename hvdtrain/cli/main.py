"""The command line: a verb, or a recipe to train."""

import sys

from hvdtrain import __version__
from hvdtrain.config.errors import LaunchError, UserError, on_command_line
from hvdtrain.config.registry import resolve
from hvdtrain.recipes import RECIPES
from hvdtrain.runtime.control.agreement import installed_versions
from hvdtrain.runtime.failures import show_alone, show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.logs import drop_unreadable_output, set_up_logging
from hvdtrain.runtime.startup import import_tensorflow

VERBS = {
    "train": "hvdtrain.cli.train:main",
    "evaluate": "hvdtrain.cli.inference:evaluate",
    "predict": "hvdtrain.cli.inference:predict",
    "generate": "hvdtrain.cli.inference:generate",
    "export": "hvdtrain.cli.export:main",
    "checkpoint": "hvdtrain.cli.checkpoint:main",
    "data": "hvdtrain.cli.data:main",
    "bench": "hvdtrain.cli.bench:main",
    "launch": "hvdtrain.cli.launch:main",
    "recipes": "hvdtrain.cli.train:list_recipes",
    "env": "hvdtrain.cli.doctor:env",
    "doctor": "hvdtrain.cli.doctor:main",
    "setup": "hvdtrain.cli.doctor:setup",
}
DISTRIBUTED = ("train", "evaluate", "predict", "generate", "bench")
"""Verbs that run on every rank; the others do on rank 0 alone."""

USAGE = """\
usage: python -m hvdtrain [VERB] [RECIPE] [--option value ...]      or: hvdtrain ...

Verbs:
  train [RECIPE]       train a model (the default verb; the default recipe is digits)
  evaluate RUN         evaluate a checkpoint of a run on its validation data, or on other data
  predict RUN PATH|-   predict images, rows of a table or arrays with the model of a run
  generate RUN --prompt TEXT
                       continue a text with the language model of a run
  export RUN --format litert onnx ...
                       write the model of a run for other programs, and check each file
  checkpoint list|verify|export DIR
                       show checkpoints, compare them with their checksums, export a model
  data pack SRC DEST   pack class folders of images into TFRecords
  bench                compare backends, hand-written loops and collectives, with a report
  launch [-np N] ...   print or run the command that starts several processes here
  recipes              list the recipes
  env                  print versions, machine and settings for a bug report
  doctor               check the installation, part by part
  setup                build Horovod into the active environment

Several processes:
  horovodrun -np 4 python -m hvdtrain [...]
  mpirun -np 4 python -m hvdtrain [...]

"python -m hvdtrain VERB --help" shows a verb's options, --version the versions."""


def run() -> int:
    """Run the command line of this process, as the command `hvdtrain` does, and return the exit code."""
    return main(sys.argv[1:])


WITH_TENSORFLOW = ("checkpoint", "data")
"""Verbs that import it without starting a session, which would do it quietly."""


def main(argv: list[str]) -> int:
    """Run the verb in `argv` (default: train) and return the exit code."""
    set_up_logging()
    try:
        environment = detect_environment()
    except LaunchError as error:
        return show_alone(None, error, wording=on_command_line)
    if argv[:1] in (["--version"], ["-V"]):
        if environment.rank == 0:
            print(version_line())
        return 0
    verb, rest = _split(argv)
    if verb is None:
        # Every rank would print the same.
        if environment.rank == 0:
            print(USAGE)
        return 0
    if verb not in VERBS:
        from hvdtrain.cli.running import refuse_word

        if verb.endswith(".py"):
            words = " ".join(argv)
            return refuse_word(f"A script is started as it is: horovodrun -np 2 python {words}", "", [])
        return refuse_word(f"There is no verb or recipe {verb!r}.", verb, [*VERBS, *RECIPES])
    if verb not in DISTRIBUTED and environment.rank > 0:
        return 0
    if verb in WITH_TENSORFLOW:
        import_tensorflow()
    try:
        code: int = resolve("verb", verb, VERBS)(rest)
    except UserError as error:
        code = show_failure(environment, error, wording=on_command_line)
    except BrokenPipeError:  # the reader of the pipe has what it wants
        code = 0
    drop_unreadable_output()  # Python would complain of it at exit
    return code


def version_line() -> str:
    """Return the versions of hvdtrain, Python, TensorFlow, Keras and Horovod in a line."""
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
