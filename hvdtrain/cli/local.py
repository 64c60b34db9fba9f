"""What the commands share that run in one process, whoever started it."""

from collections.abc import Callable
from typing import TypeVar

from hvdtrain.cli.launch import parse_errors_as_user_errors
from hvdtrain.config.errors import UserError
from hvdtrain.runtime.failures import show_failure
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.lean_import import NOT_FOR_RUNS, left_out
from hvdtrain.runtime.quiet import import_tensorflow_quietly, start_up_chatter_hidden

T = TypeVar("T")


def import_tensorflow_for_cpu() -> None:
    """Import TensorFlow without its chatter, and leave the GPUs to others."""
    with left_out(*NOT_FOR_RUNS):
        import_tensorflow_quietly()
    import tensorflow as tf

    with start_up_chatter_hidden():
        tf.config.set_visible_devices([], "GPU")


def run_here(parse: Callable[[], T], action: Callable[[T], int]) -> int:
    """Run a command and return its exit code; under a launcher rank 0 alone runs it.

    Args:
        parse: reads the command line.
        action: what the command does; it gives the exit code.
    """
    environment = detect_environment()
    if environment.rank > 0:
        return 0
    try:
        with parse_errors_as_user_errors():
            request = parse()
        return action(request)
    except (UserError, KeyboardInterrupt) as error:
        return show_failure(environment, error)
