"""Horovod's own launcher, without lines that are not about the job.

It imports TensorFlow to find out what Horovod was built with, which writes start-up lines; and where a rank fails under
Gloo it ends with a traceback of its own, below what the rank said.
"""

import sys
from collections.abc import Callable
from typing import Any

from hvdtrain.runtime.quiet import start_up_chatter_hidden

_RANKS_FAILED = "Horovod detected that one or more processes exited with non-zero status"


def run_commandline() -> Any:
    """Run `horovodrun` with the arguments of this process, and return its exit code."""
    from horovod.common import util
    from horovod.runner import launch

    util._check_extension_lambda = _quietly(util._check_extension_lambda)
    try:
        return launch.run_commandline()
    except RuntimeError as error:
        if not str(error).startswith(_RANKS_FAILED):
            raise
        rank, code = (line.rpartition(" ")[2] for line in str(error).strip().splitlines()[-2:])
        print(f"horovodrun: rank {rank} was the first to end, with exit code {code}.", file=sys.stderr)
        return 1


def _quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with start_up_chatter_hidden():
            return function(*args, **kwargs)

    return called
