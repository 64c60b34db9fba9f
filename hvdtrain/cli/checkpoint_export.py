"""`checkpoint export`: write the model of a checkpoint as a file that Keras or NumPy loads."""

import argparse
from pathlib import Path

from hvdtrain.cli.launch import parse_errors_as_user_errors, run_on_all_ranks, shows_help
from hvdtrain.config.errors import ConfigError, on_command_line
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.failures import show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session

_EPILOG = """\
The end of FILE's name says what is written:
  .keras         the model, for keras.models.load_model
  .weights.h5    its weights, for model.load_weights
  .npz           its weights as arrays by their place in the model, for numpy.load

Of a run everything is known. Of a script's checkpoints, weights can be written as .npz; for the others
--model names the function of the script that builds the model.
"""


def main(argv: list[str]) -> int:
    """Export a checkpoint and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    environment = detect_environment()
    if environment.size > 1:
        error = ConfigError(
            f"checkpoint export runs in one process. Received: {environment.size}, started by {environment.launcher}."
        )
        return show_failure(environment, error, wording=on_command_line)
    return run_on_all_ranks(lambda files: _parse(argv), lambda _: (RuntimeConfig(backend="single"), {}), _export)


def _parse(argv: list[str]) -> argparse.Namespace:
    with parse_errors_as_user_errors():
        return _parser().parse_args(argv)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain checkpoint export",
        description="Write the model of a checkpoint as a file that Keras or NumPy loads.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a run, a folder of checkpoints, or one checkpoint")
    add("--to", type=Path, metavar="FILE", help="a new file (default: step-N.keras in DIR, or step-N.npz)")
    add("--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step")
    add("--model", metavar="MODULE:FUNCTION", help="builds the model of a script's checkpoints")
    return parser


def _export(session: Session, arguments: argparse.Namespace) -> None:
    from hvdtrain.runs.use.export import export

    exported = export(
        session, folder=arguments.folder, which=arguments.checkpoint, file=arguments.to, builder=arguments.model
    )
    print(exported.file)
    if exported.layers:
        print(f"Before keras.models.load_model: from hvdtrain import {', '.join(exported.layers)}")
