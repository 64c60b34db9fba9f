"""Shared by verbs on several ranks: connecting, agreeing on options, and failing."""

import argparse
import contextlib
import io
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.agreement import together
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.failures import FailFast, show_failure
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.lean_import import NOT_FOR_RUNS, left_out
from hvdtrain.runtime.session import INTERRUPTED, Link, Session, open_link, open_session, set_current

LINK_TIMEOUT_S = 120.0

T = TypeVar("T")


def run_on_all_ranks(
    parse: Callable[[], T],
    describe: Callable[[T], tuple[RuntimeConfig, Mapping[str, str]]],
    action: Callable[[Session, T], None],
    serve: Callable[[Session], object] = lambda session: None,
) -> int:
    """Run a verb on every rank and return the exit code.

    Args:
        parse: parses the command line; a mistake on any rank is shown once and ends the job.
        describe: returns the runtime options, and the values that must agree on all ranks.
        action: the verb itself.
        serve: additional work of ranks that serve another rank.
    """

    def run(link: Link, request: T) -> None:
        runtime, facts = describe(request)
        with left_out(*NOT_FOR_RUNS):
            session = open_session(link, runtime, facts)
        set_current(session)
        if session.serves:
            serve(session)
        else:
            action(session, request)
        session.close()

    return run_linked(parse, run)


def run_linked(parse: Callable[[], T], action: Callable[[Link, T], None]) -> int:
    """Run a verb like `run_on_all_ranks`, without a session: neither TensorFlow nor Horovod is started.

    Args:
        parse: as above.
        action: the verb itself; closes the link.
    """
    environment = detect_environment()
    link: Link | None = None

    def on_interrupt() -> str:
        return link.on_interrupt() if link else INTERRUPTED

    def others_failed() -> bool:
        return link is not None and bool(link.control.failures())

    try:
        with InterruptWatch(environment, on_interrupt, others_failed):
            link = open_link(timeout=LINK_TIMEOUT_S, policy=FailFast(wording=on_command_line))
            action(link, together(link.control, parse, timeout=LINK_TIMEOUT_S))
    except BaseException as error:
        code = link.fail(error) if link else show_failure(environment, error, wording=on_command_line)
        if link is None and environment.size > 1:
            end_process(code)
        return code
    return 0


def shows_help(parser: argparse.ArgumentParser, argv: list[str]) -> bool:
    """Whether `argv` asks for help; if so, print it on rank 0."""
    asked = bool({"-h", "--help"} & set(argv))
    if asked and detect_environment().rank == 0:
        parser.print_help()
    return asked


def positive(text: str) -> int:
    """Return an argument that is a whole number from 1 on, for `argparse`."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1. Received: {text!r}.")
    return int(text)


@contextlib.contextmanager
def parse_errors_as_user_errors() -> Iterator[None]:
    """Convert the error that a command-line parser prints on exit to a UserError."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit as leave:
        if leave.code in (0, None):
            raise
        mistake = _user_error_within(leave)
        if mistake is not None:
            raise mistake from None
        raise UserError(without_frame(said.getvalue())) from None


def _user_error_within(leave: SystemExit) -> UserError | None:
    """Return the error of an option dataclass that the parser met, None if the parser itself refused the words."""
    met: BaseException | None = leave
    while met is not None and not isinstance(met, UserError):
        met = met.__cause__ or met.__context__
    return met


def without_frame(text: str) -> str:
    """Strip the colours and box from a parser's message, which launchers' line prefixes tear apart."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    lines = [line.strip("│").rstrip() for line in plain.splitlines() if not line.startswith("╭")]
    kept = [line for line in lines if line.strip(" ─╰╯")]
    return textwrap.dedent("\n".join(kept)).strip()
