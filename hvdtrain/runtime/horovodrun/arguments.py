"""Arguments of the ranks' command, which are none of `horovodrun`'s."""

import argparse
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from hvdtrain.runtime.horovodrun.replaced import replaced


class _Parser(argparse.ArgumentParser):
    """Takes no word for the beginning of several options at once."""

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        # argparse looks at all words before it knows where the command begins, and refuses those of the command that
        # might be short for two options of its own: --timeline.
        found: list[Any] = super()._get_option_tuples(option_string)
        return found if len(found) == 1 else []


def command_left_alone(launch: Any) -> AbstractContextManager[None]:
    """Let `launch`, Horovod's module, pass options of the ranks' command on that are like several of its own."""
    return replaced(launch, argparse=SimpleNamespace(**{**vars(argparse), "ArgumentParser": _Parser}))
