"""Merge what the ranks have recorded into one trace, in the format of Perfetto and chrome://tracing."""

import json
import math
import os
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

PARTS = ".json"
"""End of the names of ranks' own files."""
FIRST_ROW = "training"
EXCHANGE = "exchange, as rank 0 saw it"
STEP = "step "
NEGOTIATE = "NEGOTIATE_"
SHORTEST_US = 1.0
"""Shorter events are left out: there are thousands in a step."""
LATEST_US = 60e6
"""After the last event of a rank its world may still exchange something: what a rank has left is not drawn."""
COMPUTES = re.compile(r"TensorFlow: (tf_Compute|/device:|/host:CPU tf_Compute)")
"""Rows of threads and streams that carry out the operations of a step."""
NO_OPERATION = re.compile(r"::|^Executor|^Horovod|^nccl", flags=re.IGNORECASE)
"""Events in these rows that are TensorFlow's own bookkeeping, or the exchange itself."""

Event = dict[str, Any]
"""One of a trace, with the name of the row in which it is drawn."""
Interval = tuple[float, float]


@dataclass(frozen=True)
class Exchange:
    """Activity of Horovod on a tensor."""

    tensor: str
    name: str
    """``NEGOTIATE_ALLREDUCE``: it waits for ranks that have not asked for it yet; ``ALLREDUCE``: it is carried out."""
    begin: float
    """In µs of the wall clock."""
    end: float
    top: bool = True
    """Whether it is not a part of another one."""
    tensors: int = 1

    def event(self, row: str) -> Event:
        """Return it as an event of a trace."""
        many = {"tensors": self.tensors} if self.tensors > 1 else {}
        args = {"tensor": self.tensor, **many}
        return {"name": self.name, "ts": self.begin, "dur": self.end - self.begin, "args": args, "row": row}


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


def read_profiles(folder: Path) -> Iterator[Event]:
    """Yield the events of TensorFlow's profiles in `folder`, in µs of this host's clock."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for file in sorted(folder.rglob("*.xplane.pb")):
        space = xplane_pb2.XSpace()
        space.ParseFromString(file.read_bytes())
        start = 0.0  # of the profiler, in ns of the wall clock: times count from there
        for plane in space.planes:
            stats = {number: known.name for number, known in plane.stat_metadata.items()}
            for stat in plane.stats:
                if stats.get(stat.metadata_id) == "profile_start_time":
                    start = float(stat.uint64_value or stat.int64_value)
        for plane in space.planes:
            names = {number: known.display_name or known.name for number, known in plane.event_metadata.items()}
            where = "" if plane.name == "/host:CPU" else f"{plane.name} "
            for line in plane.lines:
                row = f"TensorFlow: {where}{line.display_name or line.name or line.id}"
                for event in line.events:
                    duration = event.duration_ps / 1e6
                    if duration >= SHORTEST_US:
                        name = names.get(event.metadata_id, "").partition("#")[0] or "?"
                        begin = (start + line.timestamp_ns) / 1e3 + event.offset_ps / 1e6
                        yield {"name": name, "ts": begin, "dur": duration, "row": row}


def read_horovod(path: Path) -> Iterator[Exchange]:
    """Yield what is in Horovod's file, but for what a process that was killed left half written."""
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


def read_events(path: Path) -> Iterator[Event]:
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


def read_part(path: Path) -> tuple[dict[str, Any], list[Event]] | None:
    """Return header and events of a rank's file; None if its process was killed before it wrote its name."""
    header, rows, events = None, {}, []
    for event in read_events(path):
        if event["name"] == "process_name":
            header = event["args"]
        elif event["name"] == "thread_name":
            rows[event["tid"]] = event["args"]["name"]
        else:
            kept = {key: value for key, value in event.items() if key not in ("ph", "pid", "tid")}
            events.append({**kept, "row": rows[event["tid"]]})
    return None if header is None else (header, events)


def parts_folder(file: Path) -> Path:
    """Return the folder beside `file` with what each rank records."""
    return file.with_name(f"{file.name}.parts")


def merge_parts(file: Path) -> dict[str, Overlap]:
    """Write `file` from its folder of parts; return the overlap of each profiled rank, by its name in the trace.

    Raises:
        OSError: it cannot be written.
    """
    parts = [part for path in sorted(parts_folder(file).glob(f"rank-*{PARTS}")) if (part := read_part(path))]
    parts.sort(key=lambda part: (part[0]["world"], part[0]["rank"]))
    several = len({header["world"] for header, _ in parts}) > 1
    recorded = {}  # by Horovod on one rank of each world, on rank 0's clock
    for header, _ in parts:
        if header["horovod"]:
            moved = header["offset_us"]
            seen = read_horovod(Path(header["horovod"]))
            recorded[header["world"]] = [replace(it, begin=it.begin + moved, end=it.end + moved) for it in seen]
    processes: list[tuple[int, str, list[Event]]] = []
    overlaps, clocks = {}, {}
    for number, (header, events) in enumerate(parts, start=1):
        name = header["name"] + (f", world {header['world']}" if several else "")
        events = [{**event, "ts": event["ts"] + header["offset_us"]} for event in events]
        exchanges = recorded.get(header["world"], [])
        messages = messages_of(events, exchanges)
        if overlap := overlap_of(events, messages):
            overlaps[name] = overlap
        if header["uncertainty_us"]:
            clocks[header["name"]] = f"{header['offset_us']:.0f} us added, +- {header['uncertainty_us']:.0f} us"
        processes.append((number, name, [*events, *(each.event(EXCHANGE) for each in messages)]))
        if header["horovod"] and exchanges:
            tensors = [each.event(each.tensor) for each in exchanges]
            processes.append((1000 + number, f"Horovod's tensors, seen by {name}", tensors))
    begin = min((event["ts"] for _, _, events in processes for event in events), default=0.0)
    drawn = (each for number, name, events in processes for each in _drawn(number, name, events, begin))
    notes: dict[str, Any] = {"clocks": clocks or "all ranks have the clock of rank 0", "exchange": EXCHANGE}
    notes["overlap"] = {name: asdict(found) for name, found in overlaps.items()}
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        stream.write(",\n".join(map(json.dumps, drawn)))
        stream.write(f'\n], "otherData": {json.dumps(notes)}}}\n')
    os.replace(draft, file)
    return overlaps


def messages_of(events: Sequence[Mapping[str, Any]], exchanges: Iterable[Exchange]) -> list[Exchange]:
    """Return the messages in which the rank of these events took part: tensors exchanged at the same time are one.

    They begin at one time on all ranks. A rank other than 0 may be done earlier: at the latest when its step ends.
    """
    if not events:
        return []
    times = [event["ts"] for event in events]
    steps = sorted(_interval(event) for event in events if event["name"].startswith(STEP))
    carried_out = (each for each in exchanges if each.top and not each.name.startswith(NEGOTIATE))
    joined: list[Exchange] = []
    for each in sorted(carried_out, key=lambda exchange: exchange.begin):
        if joined and each.begin <= joined[-1].end:
            last = joined[-1]
            joined[-1] = replace(last, end=max(last.end, each.end), tensors=last.tensors + each.tensors)
        else:
            joined.append(each)
    found = []
    for each in joined:
        if min(times) <= each.begin <= max(times) + LATEST_US:
            step = bisect_right(steps, (each.begin, math.inf)) - 1
            within = step >= 0 and each.begin <= steps[step][1]
            found.append(replace(each, end=min(each.end, steps[step][1])) if within else each)
    return found


def overlap_of(events: Sequence[Mapping[str, Any]], messages: Sequence[Exchange]) -> Overlap | None:
    """Return how messages and operations of a rank overlap; None if no step of it was profiled."""
    operations = (each for each in events if COMPUTES.match(each["row"]) and not NO_OPERATION.search(each["name"]))
    computing = union(map(_interval, operations))
    if not computing:
        return None
    steps = [_interval(event) for event in events if event["name"].startswith(STEP)]
    steps = [step for step in steps if step[0] < computing[-1][1] and computing[0][0] < step[1]]
    within = [(max(begin, each.begin), min(end, each.end)) for begin, end in steps for each in messages]
    exchanging = union((begin, end) for begin, end in within if begin < end)
    if not exchanging:
        return None
    total = _length(exchanging)
    hidden = total + _length(computing) - _length(union([*exchanging, *computing]))
    return Overlap(len(steps), total / len(steps) / 1000, hidden / total)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return what at least one of the intervals covers, in order."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _drawn(number: int, name: str, events: Iterable[Event], begin: float) -> Iterator[Event]:
    """Yield the events of a process, in µs from `begin` on, and the names and the order of its rows."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    rows: dict[str, int] = {}
    for event in events:
        row = event["row"]
        if row not in rows:
            rows[row] = len(rows) + 1
            place = {"pid": number, "tid": rows[row]}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": row}}
            order = 0 if row == FIRST_ROW else 1 if row == EXCHANGE else 1 + rows[row]
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": order}}
        kept = {key: value for key, value in event.items() if key != "row"}
        yield {"ph": "X", **kept, "ts": round(event["ts"] - begin, 3), "pid": number, "tid": rows[row]}


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
