"""Horovod's own record of its exchanges, which rank 0 writes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
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


def read_horovod(path: Path) -> Iterator[Exchange]:
    """Yield what is in the file; what a process that was killed left half written is passed over."""
    names: dict[int, str] = {}
    opened: dict[int, list[tuple[str, float]]] = {}
    start = 0.0
    for event in read_events(path):
        pid, kind = event.get("pid", 0), event.get("ph")
        if kind == "M" and event.get("name") == "process_name":
            args = event.get("args", {})
            start = float(args.get("start_time_since_epoch_in_micros", start))
            names[pid] = args.get("name", names.get(pid, ""))
        elif kind == "B":
            opened.setdefault(pid, []).append((event["name"], start + event["ts"]))
        elif kind == "E" and opened.get(pid):
            name, begin = opened[pid].pop()
            yield Exchange(names.get(pid, ""), name, begin, start + event["ts"], top=not opened[pid])


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace in Chrome's array format, up to the first one that is cut off."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    decoder, place = json.JSONDecoder(), text.find("[") + 1
    while (place := text.find("{", place)) >= 0:
        try:
            event, place = decoder.raw_decode(text, place)
        except ValueError:
            return
        yield event
