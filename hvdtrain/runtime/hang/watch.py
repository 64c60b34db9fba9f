"""Watch, on the watchdog's thread, whether the job hangs, word it, and end the job."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.config.errors import LaunchError, opt
from hvdtrain.runtime.control.channel import ControlChannel, name_ranks
from hvdtrain.runtime.hang.position import show_own_stacks
from hvdtrain.runtime.hang.progress import ProgressWatch, Report
from hvdtrain.runtime.logs import LOGGER

_PLURAL = {"waits": "wait", "is": "are"}
_PHASES = {
    "loading": "loading data",
    "compiling": "compiling",
    "evaluation": "in evaluation",
    "saving": "saving",
    "callbacks": "in callbacks",
    "step": "in its step",
}
_STATES = {
    "leaving": "at the end of its script",
    "reading": "reading data",
    "exchange": "in a message to the other ranks",
    "function": "in a compiled function",
}


@dataclass(frozen=True)
class Seen:
    """The latest report of a rank, and the seconds since it came."""

    report: Report
    silent: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Cause that holds up a job in which some ranks wait."""

    waiting: Sequence[int]
    """Ranks that wait for others, and have made no progress within the hang timeout."""
    silent: Sequence[int]
    """Ranks that post nothing any more: stopped, in C code that holds Python's lock, or on a machine that is gone."""
    stuck: Sequence[int]
    """Ranks that wait for nobody, and have made no progress either."""
    working: Sequence[int]
    """Ranks that are still making progress: the others wait for them."""

    @property
    def hangs(self) -> bool:
        """Whether the job is to be ended: ranks wait, and none makes progress."""
        return bool(self.waiting) and not self.working


def decide(ranks: Mapping[int, Seen], *, timeout: float, silence: float, slack: float = 0.0) -> Verdict:
    """Sort the ranks of a job.

    A rank that waits at the end of its script, or for others to load their data, waits with a patience of its own: it
    counts as waiting only where a rank has fallen silent.

    Args:
        ranks: every rank of the job.
        timeout: seconds in which a rank that does not hang makes progress.
        silence: seconds after which a rank that posts nothing counts as silent.
        slack: seconds by which reports of others may be late.
    """
    silent = [rank for rank, seen in ranks.items() if seen.silent >= silence]
    heard = {rank: seen.report for rank, seen in ranks.items() if rank not in silent}
    stuck = {rank: report for rank, report in heard.items() if report.idle >= timeout - slack}
    waiting = [rank for rank, report in stuck.items() if waits(report, bool(silent))]
    others = stuck.keys() - set(waiting)
    return Verdict(sorted(waiting), sorted(silent), sorted(others), sorted(heard.keys() - stuck.keys()))


def waits(report: Report, any_silent: bool = False) -> bool:
    """Return whether a rank without progress waits for others, one of which may be silent."""
    if report.state == "collective":
        return True
    in_training = report.state == "exchange" and report.phase != ""
    return in_training or (any_silent and report.state in ("exchange", "leaving"))


def left_alone(ranks: Mapping[int, Seen], quiet: float) -> Verdict | None:
    """Return a verdict where ranks are at the end of their scripts, and all others have waited in collectives.

    A rank that has exited joins no further collective: the others need not wait for the hang timeout to know that.

    Args:
        ranks: every rank of the job.
        quiet: seconds for which each of the others has waited, at least.
    """
    left = [rank for rank, seen in ranks.items() if seen.report.state == "leaving"]
    others = {rank: seen.report for rank, seen in ranks.items() if rank not in left}
    if left and others and all(each.state == "collective" and each.idle >= quiet for each in others.values()):
        return Verdict(sorted(others), [], sorted(left), [])
    return None


def describe_hang(verdict: Verdict, ranks: Mapping[int, Seen], timeout: float) -> str:
    """Return the message to the user about a job that hangs."""
    first = f"The job hangs: no rank has made progress for {timeout:g} s, and the waiting ranks would wait forever."
    lines = [first, *_lines(verdict, ranks)]
    if not verdict.silent and not verdict.stuck:
        lines.append("  They wait in different collectives, or in one that another rank has left out or called twice.")
    never = opt("hang_timeout", 0)
    lines.append(f"If ranks may be this far apart, use a larger {opt('hang_timeout')}; {never} never ends a job.")
    return "\n".join(lines)


def describe_left(verdict: Verdict, ranks: Mapping[int, Seen]) -> str:
    """Return the message about ranks that wait for one that has left its script."""
    first = "The job hangs: ranks wait in a collective for others that have left their script."
    return "\n".join([first, *_lines(verdict, ranks), "Take part in the same collectives on every rank."])


def describe_cut_off(own: Seen, seconds: float, why: str) -> str:
    """Return the message of a rank that waits, and cannot reach the other ranks or the launcher any more."""
    return (
        f"The job hangs: this rank {_waiting(own)}, and has been cut off from the others for {seconds:.0f} s. {why} "
        "Its network is gone, or horovodrun has ended."
    )


def describe_wait(verdict: Verdict, ranks: Mapping[int, Seen], timeout: float) -> str:
    """Return the message about ranks that wait for others, which are at work."""
    waiting = "; ".join(_grouped(ranks, verdict.waiting, _waiting))
    working = "; ".join(_grouped(ranks, verdict.working, lambda seen: f"is {_place(seen.report)}"))
    return f"{waiting}, for {timeout:g} s by now, while {working}."


def _lines(verdict: Verdict, ranks: Mapping[int, Seen]) -> list[str]:
    """Return a line for each group of ranks, those first for which the others wait."""

    def silent(seen: Seen) -> str:
        return (
            f"gave no sign of life for {seen.silent:.0f} s: stopped, in C code that holds Python's lock, or its "
            f"machine is gone; it was last {_place(seen.report)}"
        )

    lines = _grouped(ranks, verdict.silent, silent)
    lines += _grouped(ranks, verdict.stuck, lambda seen: f"did not come: {_place(seen.report)}")
    return [f"  {line}" for line in [*lines, *_grouped(ranks, verdict.waiting, _waiting)]]


def _grouped(ranks: Mapping[int, Seen], chosen: Sequence[int], phrase: Callable[[Seen], str]) -> list[str]:
    """Return a phrase for each group of ranks of which the same is said, its verb in the plural for several."""
    groups: dict[str, list[int]] = {}
    for rank in chosen:
        groups.setdefault(phrase(ranks[rank]), []).append(rank)
    lines = []
    for text, members in groups.items():
        verb, _, rest = text.partition(" ")
        host = ranks[members[0]].report.host
        if len(members) > 1:
            lines.append(f"{name_ranks(members)} {_PLURAL.get(verb, verb)} {rest}")
        else:
            lines.append(f"{name_ranks(members)}{f' ({host})' if host else ''} {text}")
    return lines


def _waiting(seen: Seen) -> str:
    report = seen.report
    if report.state == "leaving":
        return "waits at the end of its script"
    what = "for the other ranks" if report.state == "exchange" else f"in {_collectives(report)}"
    return f"waits {what}{_at(report)}"


def _place(report: Report) -> str:
    """Return "in callbacks after step 12, at train.py:41 in on_batch_end"."""
    state = f"in {_collectives(report)}" if report.state == "collective" else _STATES.get(report.state)
    return (_PHASES.get(report.phase) or state or "in code of its own") + _at(report)


def _at(report: Report) -> str:
    step = "" if report.step is None else f" at step {report.step}"
    return step + (f", {report.where}" if report.where else "")


def _collectives(report: Report) -> str:
    if not report.collectives:
        return "a collective"
    names = ", ".join(report.collectives)
    return f"the collective {names}" if len(report.collectives) == 1 else f"one of the collectives {names}"


_BOARD = "activity"
_READS_A_SECOND = 500
"""Requests of all ranks together to the store of horovodrun, which answered 2,900 on 2 cores."""
_STALL = 10.0
"""Seconds without a look after which this process, or its machine, stood still itself: it then knows nothing. Less
where others count as silent that soon: they stood still, too, and post when they go on."""
_SURE_S = 5.0
"""A busy machine may keep a process waiting for seconds."""
_QUIET_S = 1.5
"""A rank that has waited in a collective for so long, or has left its script, posts it at once."""
_LEFT_ALONE_S = 4.0
"""The last collective of a job may end a little earlier on some ranks, which then leave."""
_OBSERVERS = 2
"""The lowest ranks look, while they wait, whether others have left."""
_TURN_S = 0.5
_MOST_TURNS = 4


class Rhythm:
    """Intervals in seconds of posts and of silence, from the hang timeout."""

    def __init__(self, timeout: float, size: int, rank: int) -> None:
        self.timeout = timeout
        self.calm = timeout / 10
        """Between two posts of a rank that is making progress."""
        self.alert = min(1.0, timeout / 10)
        """Between two posts of a rank that is making no progress."""
        self.silence = max(_SURE_S, timeout - 2 * self.calm - 1.0)
        """From the last post to silence: it may have been calm, and noticed late."""
        self.slack = min(2.5, timeout / 2)
        """By which a rank that is alert may be late."""
        self._all_read = size * (rank + 1) / _READS_A_SECOND

    def reading(self, alert: bool) -> float:
        """Between two looks at the board, which cost a request for each rank: low ranks look more often."""
        return max(self.alert if alert else self.calm, self._all_read)


class HangWatch:
    """Posts where this rank stands, reads what others post, and finds that no rank goes on while some wait.

    Args:
        control: the channel with the status board.
        progress: of this rank.
        timeout: seconds in which ranks that wait see another one go on.
        handle: called once where the job hangs, with what is to be said and a function that shows where ranks stand.
        host: this rank's host name.
        patience_with_silent: returns for how many seconds more a job that waits for silent ranks alone is not ended: an
            elastic one goes on without them.
        now: the time in seconds, of `time.monotonic` by default.
    """

    def __init__(
        self,
        control: ControlChannel,
        progress: ProgressWatch,
        timeout: float,
        handle: Callable[[str, Callable[[], None]], None],
        *,
        host: str = "",
        patience_with_silent: Callable[[], float] = lambda: 0.0,
        now: float | None = None,
    ) -> None:
        self._control = control
        self._progress = progress
        self._rhythm = Rhythm(timeout, control.size, control.rank)
        self._handle = handle
        self._host = host
        self._patience_with_silent = patience_with_silent
        self._pid_space = pid_space()
        self._beat = 0
        self._noticed = self._quiet = self._seen_left = False
        self._lost = control.unanswered_s
        self._unanswered: float | None = None
        """Since when the channel has been broken; None where it is not."""
        self.ends_job = False
        """Whether this rank has found a hang and is about to end the job, even if it goes on by now."""
        self._begin(time.monotonic() if now is None else now)

    def _begin(self, now: float) -> None:
        self._looked = now
        self._posted = self._read = -1e9
        self._messages: dict[int, tuple[bytes, float]] = {
            rank: (b"", now) for rank in range(self._control.size) if rank != self._control.rank
        }

    def look(self, now: float) -> None:
        """Look once, at the time `now`; call it about once a second, or more often where the timeout is short."""
        lost = self._newly_lost()
        if now - self._looked > min(_STALL, self._rhythm.silence / 2) + lost:
            self._begin(now)
            self._progress.went_on()
        report = self._report(lost)
        rhythm, alert, was_quiet = self._rhythm, report.idle > self._rhythm.timeout / 2, self._quiet
        waits_long = report.state == "collective" and report.idle >= _QUIET_S
        self._quiet = report.state == "leaving" or waits_long
        self._noticed = self._noticed and alert
        begun = time.monotonic()
        try:
            if self._quiet != was_quiet or now - self._posted >= (rhythm.alert if alert else rhythm.calm):
                self._posted, self._beat = now, self._beat + 1
                self._control.post(_BOARD, report.encode(self._beat))
                self._unanswered = None
            if now - self._read >= rhythm.reading(alert or (self._quiet and self._control.rank < _OBSERVERS)):
                self._read = now
                for rank, message in self._control.read(_BOARD).items():
                    if rank != self._control.rank and message != self._messages[rank][0]:
                        self._messages[rank] = (message, now)
                self._unanswered = None
                self._judge(report, now)
        except LaunchError as error:
            self._judge_cut_off(now, now + time.monotonic() - begun, error)
        self._looked = now + time.monotonic() - begun  # what a slow store takes is not a standstill

    def _newly_lost(self) -> float:
        """Return the seconds, since the last call, in which the channel did not answer."""
        before, self._lost = self._lost, self._control.unanswered_s
        return self._lost - before

    def _report(self, lost: float) -> Report:
        report = self._progress.look(lost)
        return replace(report, host=self._host, pid=os.getpid(), pid_space=self._pid_space)

    def _judge_cut_off(self, asked: float, now: float, error: LaunchError) -> None:
        """End this rank where it waits for others and has lost the channel to them: no launcher may reach it either.

        Args:
            asked: when the request was made that `error` came from.
            now: when it was given up.
            error: says what did not answer.
        """
        self._unanswered = asked if self._unanswered is None else self._unanswered
        own = self._report(self._newly_lost())
        seconds, rank = now - self._unanswered, self._control.rank
        if waits(own) and own.idle >= self._rhythm.timeout and seconds >= self._rhythm.silence:
            text = describe_cut_off(Seen(own), seconds, error.message)
            self._end(text, Verdict([rank], [], [], []), {rank: Seen(own)})

    def _judge(self, own: Report, now: float) -> None:
        ranks = {self._control.rank: Seen(own)} | {
            rank: Seen(Report.decode(message) if message else Report(), now - since)
            for rank, (message, since) in self._messages.items()
        }
        if own.idle >= self._rhythm.timeout:
            self._judge_hang(ranks)
        elif own.state == "collective" and own.idle >= _LEFT_ALONE_S:
            # A job in which ranks that have left are waited for is ended once that was seen twice.
            verdict, seen_before = left_alone(ranks, _QUIET_S), self._seen_left
            self._seen_left = verdict is not None
            if verdict is not None and seen_before and self._is_my_turn(verdict):
                self._end(describe_left(verdict, ranks), verdict, ranks)

    def _judge_hang(self, ranks: dict[int, Seen]) -> None:
        rhythm, rank = self._rhythm, self._control.rank
        verdict = decide(ranks, timeout=rhythm.timeout, silence=rhythm.silence, slack=rhythm.slack)
        if rank not in verdict.waiting:
            return
        limit = rhythm.timeout + self._patience_with_silent()
        if verdict.silent and not verdict.stuck and ranks[rank].report.idle < limit:
            return
        if verdict.hangs and self._is_my_turn(verdict):
            self._end(describe_hang(verdict, ranks, rhythm.timeout), verdict, ranks)
        elif verdict.working and not self._noticed and rank == verdict.waiting[0]:
            self._noticed = True
            LOGGER.warning(describe_wait(verdict, ranks, rhythm.timeout))

    def _is_my_turn(self, verdict: Verdict) -> bool:
        """Let lower ranks that wait speak first; return whether none has."""
        time.sleep(_TURN_S * min(verdict.waiting.index(self._control.rank), _MOST_TURNS))
        return not self._control.failures()

    def _end(self, text: str, verdict: Verdict, ranks: dict[int, Seen]) -> None:
        """End the job; this rank shows its stacks, and has silent ranks of the same host show theirs, if they can."""

        def show_stacks() -> None:
            for rank in verdict.silent:
                report = ranks[rank].report
                if report.pid and (report.host, report.pid_space) == (self._host, self._pid_space):
                    with contextlib.suppress(OSError):
                        os.kill(report.pid, signal.SIGQUIT)
            show_own_stacks(self._control.rank)

        self.ends_job = True
        self._handle(text, show_stacks)


def pid_space() -> str:
    """Return the name of the namespace of process numbers, which containers of a host may have of their own."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
