"""Run a verb on every rank, or in one process: connecting, agreeing on options, failing, signals."""

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

from hvdtrain.config.errors import ConfigError, UserError, on_command_line
from hvdtrain.config.files import FilesRead, decoded
from hvdtrain.config.observability import TraceConfig
from hvdtrain.config.registry import resolve, suggestion
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.agreement import together
from hvdtrain.runtime.control.channel import ControlChannel, end_process
from hvdtrain.runtime.failures import FailFast, show_alone, show_failure
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.launchers import Environment, detect_environment
from hvdtrain.runtime.link import INTERRUPTED, Link, open_link
from hvdtrain.runtime.logs import LOGGER, RankLog
from hvdtrain.runtime.session import Session, open_session, set_current
from hvdtrain.runtime.startup import import_tensorflow
from hvdtrain.runtime.stopping import Stopped
from hvdtrain.runtime.tracing.trace import Trace

LINK_TIMEOUT_S = 120.0

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
        elastic: whether the verb continues in another world when ranks are lost or come.
        trace: returns the options of a trace of the job.
    """

    def run(link: Link, request: T) -> None:
        runtime, facts = describe(request)
        traced = trace(request)
        link.record_to(link.trace or (None if traced is None else Trace(traced)))
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
        try:
            session.close()
        except Exception as error:  # a rank that is lost by now does not fail an elastic job
            if not (elastic(request) and session.link.leave_world(error)):
                raise

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
        elastic: as above.
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


def run_alone(
    verb: str,
    parse: Callable[[FilesRead], T],
    action: Callable[[Session, T], None],
    runtime: RuntimeConfig,
) -> int:
    """Run a verb like `run_on_all_ranks`, in one process: started as several it is refused. Return the exit code."""
    environment = detect_environment()
    if environment.size > 1:
        received = f"Received: {environment.size}, started by {environment.launcher}."
        error = ConfigError(f"{verb} runs in one process. {received}")
        return show_failure(environment, error, wording=on_command_line)
    return run_on_all_ranks(parse, lambda _: (runtime, {}), action)


def parsed_on_all_ranks(
    control: ControlChannel, parse: Callable[[FilesRead], T], known: FilesRead, *, timeout: float
) -> tuple[T, FilesRead]:
    """Parse on every rank, with the files that the command line names as the first rank sees them. Collective.

    Args:
        control: the channel to the other ranks.
        parse: parses the command line; reads files by its argument.
        known: files read in an earlier world of an elastic job, in which another rank may have been the first.
        timeout: seconds to wait for the other ranks.

    Raises:
        UserError: see `together`.
    """
    files = FilesRead(known.contents)
    attempt = _attempt(parse, files)
    if control.size > 1:
        mine = files.encode()
        firsts = control.exchange(mine if control.rank == 0 else b"", timeout=timeout)[0]
        if mine != firsts:
            files = FilesRead(decoded(firsts))
            attempt = _attempt(parse, files)
    return together(control, attempt, timeout=timeout), files


def _attempt(parse: Callable[[FilesRead], T], files: FilesRead) -> Callable[[], T]:
    """Parse, and return a function that returns the result or raises the user's mistake."""
    try:
        result = parse(files)
    except UserError as error:
        mistake = error

        def fail() -> T:
            raise mistake

        return fail
    return lambda: result


def run_here(parse: Callable[[], T], action: Callable[[T], int]) -> int:
    """Run a verb in one process, under a launcher on rank 0 only, and return its exit code.

    Args:
        parse: parses the command line.
        action: the verb itself; returns the exit code.
    """
    environment = detect_environment()
    if environment.rank > 0:
        return 0
    try:
        return action(parse())
    except (UserError, KeyboardInterrupt) as error:
        return show_failure(environment, error, wording=on_command_line)


def run_command(verb: str, argv: list[str], commands: Mapping[str, str], usage: str) -> int:
    """Run the command of `verb` that `argv` begins with, and return its exit code: 2 if it does not exist.

    Args:
        verb: as it is typed.
        argv: the words after it.
        commands: `module:function` by name; the function takes the words after the name.
        usage: printed without a command, and for help.
    """
    if argv and argv[0] in commands:
        code: int = resolve(f"command of {verb}", argv[0], commands)(argv[1:])
        return code
    if argv and argv[0] not in ("-h", "--help", "help"):
        return refuse_word(f"{verb} has no command {argv[0]!r}.", argv[0], commands)
    if detect_environment().rank == 0:
        print(usage)
    return 0


def refuse_word(message: str, word: str, known: Iterable[str]) -> int:
    """Say on the first rank that `word` is none of those that are known, with the nearest; return the exit code."""
    if detect_environment().rank == 0:
        print(f"hvdtrain: error: {message}{suggestion(word, dict.fromkeys(known, ''))}", file=sys.stderr)
    return 2


@contextmanager
def ended_by_exceptions() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit (128 + the signal) within, so that started programs are ended first."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def import_tensorflow_for_cpu() -> None:
    """Import TensorFlow quietly, with GPUs hidden."""
    import_tensorflow()
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
