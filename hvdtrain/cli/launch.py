"""Shared by verbs on several ranks: connecting, agreeing on options, and failing."""

import argparse
import contextlib
import io
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

from hvdtrain.cli.parsing import parsed_on_all_ranks
from hvdtrain.config.errors import UserError, on_command_line
from hvdtrain.config.files import FilesRead
from hvdtrain.config.observability import TraceConfig
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import end_process
from hvdtrain.runtime.failures import FailFast, show_alone
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.launchers import Environment, detect_environment
from hvdtrain.runtime.link import INTERRUPTED, Link, open_link
from hvdtrain.runtime.logs import LOGGER, RankLog
from hvdtrain.runtime.session import Session, new_trace, open_session, set_current
from hvdtrain.runtime.stopping import Stopped

LINK_TIMEOUT_S = 120.0

_NO_MATCH = re.compile(
    r"Error parsing (--[\w-]+): no type matching\s+\{None\}\|(\w+)\s+could be instantiated\s+from\s+\['(.*?)'\]\.\s+"
    r"Got errors:.*?(?=Argument helptext|For full helptext|$)",
    re.DOTALL,
)
"""What the parser says of a value that an option with the default None does not take: two lists of causes."""

T = TypeVar("T")


def run_on_all_ranks(
    parse: Callable[[FilesRead], T],
    describe: Callable[[T], tuple[RuntimeConfig, Mapping[str, str]]],
    action: Callable[[Session, T], None],
    serve: Callable[[Session], object] = lambda session: None,
    elastic: Callable[[T], bool] = lambda request: False,
    trace: Callable[[T], TraceConfig | None] = lambda request: None,
) -> int:
    """Run a verb on every rank and return the exit code.

    Args:
        parse: parses the command line, and reads files by its argument; a mistake on any rank is shown once and ends
            the job.
        describe: returns the runtime options, and the values that must agree on all ranks.
        action: the verb itself.
        serve: additional work of ranks that serve another rank.
        elastic: whether the verb goes on in another world when ranks are lost or come.
        trace: what is recorded of the job.
    """

    def run(link: Link, request: T) -> None:
        runtime, facts = describe(request)
        link.record_to(link.trace or new_trace(trace(request), runtime.backend))
        session = open_session(link, runtime, facts)
        set_current(session)
        try:
            if session.serves:
                with link.stoppable(0, grace=math.inf, trains=False):
                    serve(session)
                    session.close()
                return
            action(session, request)
        except Stopped:
            if session.world.primary:
                LOGGER.info(link.on_interrupt())
            session.close()
            raise
        _close(session, elastic(request))

    return run_linked(parse, run, elastic)


def run_linked(
    parse: Callable[[FilesRead], T],
    action: Callable[[Link, T], None],
    elastic: Callable[[T], bool] = lambda request: False,
) -> int:
    """Run a verb like `run_on_all_ranks`, without a session: neither TensorFlow nor Horovod is started.

    A training that a signal has stopped returns that signal's code.

    Args:
        parse: as above.
        action: the verb itself; closes the link.
        elastic: see there.
    """
    environment = detect_environment()
    link: Link | None = None
    log, files = RankLog(), FilesRead()

    def place() -> Environment:
        return link.environment if link else environment

    def on_interrupt() -> str:
        return link.on_interrupt() if link else INTERRUPTED

    def others_failed() -> bool:
        return link is not None and bool(link.control.failures())

    def request_stop(number: int) -> bool:
        return link is not None and link.request_stop(number)

    try:
        with InterruptWatch(place, on_interrupt, others_failed, stop=request_stop):
            goes_on = False
            while True:
                try:
                    policy = FailFast(wording=on_command_line)
                    before = link
                    link = open_link(timeout=LINK_TIMEOUT_S, policy=policy, worlds=before.worlds if before else None)
                    link.log = log
                    link.trace = before.trace if before else None
                    request, files = parsed_on_all_ranks(link.control, parse, files, timeout=LINK_TIMEOUT_S)
                    goes_on = elastic(request)
                    action(link, request)
                    break
                except Exception as error:
                    if not (goes_on and link is not None and link.leave_world(error)):
                        raise
    except Stopped as stopped:
        return stopped.exit_code
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and environment.size == 1:
            raise  # `hvdtrain predict … | head` has what it wants
        code = link.fail(error) if link else show_alone(environment, error, wording=on_command_line)
        if link is None and environment.size > 1:
            end_process(code)
        return code
    finally:
        log.close()
    return 0


def _close(session: Session, elastic: bool) -> None:
    """Leave with the other ranks; one that is lost by now takes nothing of an elastic job with it."""
    try:
        session.close()
    except Exception as error:
        if not (elastic and session.link.leave_world(error)):
            raise


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
    text = _NO_MATCH.sub(r"\1 takes \2, or None. Received: \3.\n", textwrap.dedent("\n".join(kept)).strip())
    return re.sub(r"(?<=Expected one of)\s*\(([^()]*)\)", _sorted_choices, text)


def _sorted_choices(found: re.Match[str]) -> str:
    """Return the choices in one order: the parser's is another one in each process, and ranks must say the same."""
    return " " + ", ".join(sorted(choice.strip() for choice in found[1].split(",")))
