"""Shared by verbs that run in one process."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.cli.launch import parse_errors_as_user_errors
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.runtime.failures import show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.startup import import_tensorflow

T = TypeVar("T")


def import_tensorflow_for_cpu() -> None:
    """Import TensorFlow quietly, with GPUs hidden."""
    import_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")


def run_here(parse: Callable[[], T], action: Callable[[T], int]) -> int:
    """Run a verb and return its exit code; under a launcher, on rank 0 only.

    Args:
        parse: parses the command line.
        action: the verb itself; returns the exit code.
    """
    environment = detect_environment()
    if environment.rank > 0:
        return 0
    try:
        with parse_errors_as_user_errors():
            request = parse()
        return action(request)
    except (UserError, KeyboardInterrupt) as error:
        return show_failure(environment, error, wording=on_command_line)
