"""Decide whether a job hangs from what its ranks have posted, and word it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from hvdtrain.config.errors import opt
from hvdtrain.runtime.control.channel import name_ranks
from hvdtrain.runtime.hang.progress import Report

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
    """What holds up a job in which some ranks wait."""

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
    first = f"The job hangs: no rank has gone on for {timeout:g} s, and the ranks that wait would do so for ever."
    lines = [first, *_lines(verdict, ranks)]
    if not verdict.silent and not verdict.stuck:
        lines.append("  They wait in different collectives, or in one that another rank has left out or called twice.")
    never = opt("hang_timeout", 0)
    lines.append(f"Where ranks may be apart for longer, use a larger {opt('hang_timeout')}; {never} never ends a job.")
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
