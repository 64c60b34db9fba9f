"""Horovod's own launcher, without lines that are not about the job, and with SIGUSR1 taken for SIGTERM.

It imports TensorFlow to find out what Horovod was built with, which takes seconds and writes start-up lines; and where
a rank fails under Gloo it ends with a traceback of its own, below what the rank said, and with code 1 whatever that of
the rank was.
"""

import os
import secrets
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from typing import Any, cast

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.horovodrun.arguments import command_left_alone
from hvdtrain.runtime.horovodrun.build_check import answer_of_library
from hvdtrain.runtime.horovodrun.guarded_store import address_with_token, guarded_store
from hvdtrain.runtime.horovodrun.orderly_end import middleman
from hvdtrain.runtime.horovodrun.private_environment import private_environment
from hvdtrain.runtime.horovodrun.replaced import replaced
from hvdtrain.runtime.horovodrun.silent_ranks import silent_ranks_given_up
from hvdtrain.runtime.interfaces import candidates
from hvdtrain.runtime.launchers.environment import SECRET_VARIABLE
from hvdtrain.runtime.quiet import start_up_chatter_hidden
from hvdtrain.runtime.terminal import LastingStream

_RANKS_FAILED = "Horovod detected that one or more processes exited with non-zero status"


def run_commandline() -> Any:
    """Run `horovodrun` with the arguments of this process, and return its exit code."""
    from horovod.common import util
    from horovod.runner import gloo_run, launch
    from horovod.runner.common.util import safe_shell_exec

    util._check_extension_lambda = _quickly(util._check_extension_lambda)
    # A scheduler's warning; it would end this process at once, and the ranks soon after.
    before = signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    token = secrets.token_hex(16)

    def of_ranks(host: str, port: int) -> Mapping[str, str]:
        secret = os.environ.get(SECRET_VARIABLE) or secrets.token_hex(32)
        return {"HOROVOD_GLOO_RENDEZVOUS_ADDR": address_with_token(host, port, token), SECRET_VARIABLE: secret}

    try:
        # Its threads that pass the ranks' output on end with the first line that nobody reads; the ranks then wait
        # for ever to write theirs.
        with (
            guarded_store(gloo_run, token),
            private_environment(gloo_run, of_ranks),
            silent_ranks_given_up(gloo_run),
            command_left_alone(launch),
            replaced(safe_shell_exec, _exec_middleman=middleman),
            replaced(launch.network, get_driver_ip=_of_this_host(launch.network.get_driver_ip)),
            redirect_stdout(cast(Any, LastingStream(sys.stdout))),
            redirect_stderr(cast(Any, LastingStream(sys.stderr))),
        ):
            return launch.run_commandline()
    except LaunchError as error:
        print(f"horovodrun: error: {error.message}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if not str(error).startswith(_RANKS_FAILED):
            raise
        rank, code = (line.rpartition(" ")[2] for line in str(error).strip().splitlines()[-2:])
        print(f"horovodrun: rank {rank} was the first to end, with exit code {code}.", file=sys.stderr)
        return int(code) if code.isdecimal() and 0 < int(code) < 256 else 1
    finally:
        signal.signal(signal.SIGUSR1, before)


def _of_this_host(driver_ip: Callable[..., Any]) -> Callable[..., Any]:
    """Return `driver_ip`, Horovod's search for an address of one of some interfaces, with a message of ours."""

    def called(names: Any) -> Any:
        try:
            return driver_ip(names)
        except (KeyError, RuntimeError) as error:
            raise LaunchError(
                "--network-interfaces must name interfaces that every host has, with an IPv4 address. Received: "
                f"{', '.join(sorted(names))}. This host has {candidates()}."
            ) from error

    return called


def _quickly(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return `check`, Horovod's look at what it was built with, asking its library before it imports TensorFlow."""

    def called(extension: str, question: Callable[[Any], Any], description: str, verbose: bool) -> Any:
        answer = answer_of_library(question) if extension == "tensorflow" and not verbose else None
        if answer is not None:
            return answer
        with start_up_chatter_hidden():
            return check(extension, question, description, verbose)

    return called
