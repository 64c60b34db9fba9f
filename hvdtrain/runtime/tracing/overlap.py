"""How much of the exchange happens while TensorFlow computes: read from the events of a trace."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

NEGOTIATE = "NEGOTIATE_"


@dataclass(frozen=True)
class Exchange:
    """What Horovod did with a tensor for a while."""

    tensor: str
    name: str
    """``NEGOTIATE_ALLREDUCE``: it waits for ranks that have not asked for it yet; ``ALLREDUCE``: it is carried out."""
    begin: float
    """In µs of the wall clock."""
    end: float
    top: bool = True
    """Whether it is no part of another one."""
    tensors: int = 1

    @property
    def waits(self) -> bool:
        """Whether not all ranks had come yet."""
        return self.name.startswith(NEGOTIATE)

    def shifted(self, microseconds: float) -> "Exchange":
        """Return it on another clock."""
        return replace(self, begin=self.begin + microseconds, end=self.end + microseconds)

    def with_another(self, other: "Exchange") -> "Exchange":
        """Return both as one."""
        return replace(self, end=max(self.end, other.end), tensors=self.tensors + other.tensors)

    def event(self) -> dict[str, Any]:
        """Return it as an event of a trace."""
        many = {"tensors": self.tensors} if self.tensors > 1 else {}
        return {
            "name": self.name,
            "ts": self.begin,
            "dur": self.end - self.begin,
            "args": {"tensor": self.tensor, **many},
        }


Interval = tuple[float, float]
COMPUTES = re.compile(r"TensorFlow: (tf_Compute|/device:|/host:CPU tf_Compute)")
"""Rows of threads and streams that carry out the operations of a step."""
NO_OPERATION = re.compile(r"::|^Executor|^Horovod|^nccl", re.IGNORECASE)
"""Events in these rows that are TensorFlow's own bookkeeping, or the exchange itself."""


@dataclass(frozen=True)
class Overlap:
    """The exchange of one rank in its profiled steps."""

    steps: int
    exchange_ms: float
    """Time in which at least one message was on its way, per step."""
    hidden: float
    """Share of this time, 0 to 1, in which an operation of TensorFlow ran as well."""

    def __str__(self) -> str:
        return f"{self.exchange_ms:.1f} ms of exchange a step, {self.hidden:.0%} of it while TensorFlow computes"


def overlap_of(events: Sequence[Mapping[str, Any]], exchanges: Iterable[Exchange], step: str) -> Overlap | None:
    """Return how the exchange and the operations of a rank overlap; None if no step of it was profiled.

    Args:
        events: those of the rank, on the clock of `exchanges`.
        exchanges: its messages, of which waiting for other ranks is no part.
        step: how the names of the events that are steps begin.
    """
    computing = list(union(_interval(event) for event in events if _is_operation(event)))
    if not computing:
        return None
    profiled = computing[0][0], computing[-1][1]
    steps = [span for span in map(_interval, _named(events, step)) if _meet(span, profiled)]
    on_the_way = list(common(steps, union((each.begin, each.end) for each in exchanges)))
    if not on_the_way:
        return None
    total = _length(on_the_way)
    return Overlap(len(steps), total / len(steps) / 1000, _length(common(on_the_way, computing)) / total)


def union(intervals: Iterable[Interval]) -> Iterator[Interval]:
    """Yield what at least one of the intervals covers, in order."""
    last: Interval | None = None
    for begin, end in sorted(intervals):
        if last is not None and begin <= last[1]:
            last = last[0], max(last[1], end)
            continue
        if last is not None:
            yield last
        last = begin, end
    if last is not None:
        yield last


def common(left: Iterable[Interval], right: Iterable[Interval]) -> Iterator[Interval]:
    """Yield what both cover; the intervals of each are in order and apart."""
    ones, others = iter(left), iter(right)
    one, other = next(ones, None), next(others, None)
    while one is not None and other is not None:
        begin, end = max(one[0], other[0]), min(one[1], other[1])
        if begin < end:
            yield begin, end
        if one[1] <= other[1]:
            one = next(ones, None)
        else:
            other = next(others, None)


def _is_operation(event: Mapping[str, Any]) -> bool:
    return bool(COMPUTES.match(event["row"])) and not NO_OPERATION.search(event["name"])


def _named(events: Iterable[Mapping[str, Any]], start: str) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event["name"].startswith(start))


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _meet(left: Interval, right: Interval) -> bool:
    return left[0] < right[1] and right[0] < left[1]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
