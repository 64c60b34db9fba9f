"""One trace of what the ranks have recorded, in the format that Perfetto and chrome://tracing read."""

import json
import math
import os
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.tracing.overlap import Exchange, Overlap, overlap_of

SHORTEST_US = 1.0
"""Shorter events are left out: there are thousands in a step."""


def events_of(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of the profiles in `folder`, in µs of this host's clock."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    for file in sorted(folder.rglob("*.xplane.pb")):
        space = xplane_pb2.XSpace()
        space.ParseFromString(file.read_bytes())
        start = _start(space)
        for plane in space.planes:
            yield from _events_of_plane(plane, start)


def _start(space: Any) -> float:
    """Return when the profiler was started, in ns of the wall clock: times count from there."""
    for plane in space.planes:
        names = {number: known.name for number, known in plane.stat_metadata.items()}
        for stat in plane.stats:
            if names.get(stat.metadata_id) == "profile_start_time":
                return float(stat.uint64_value or stat.int64_value)
    return 0.0


def _events_of_plane(plane: Any, start: float) -> Iterator[dict[str, Any]]:
    names = {number: known.display_name or known.name for number, known in plane.event_metadata.items()}
    for line in plane.lines:
        row = f"TensorFlow: {_row(plane.name, line)}"
        for event in line.events:
            duration = event.duration_ps / 1e6
            if duration >= SHORTEST_US:
                begin = (start + line.timestamp_ns) / 1e3 + event.offset_ps / 1e6
                yield {"name": _short(names.get(event.metadata_id, "")), "ts": begin, "dur": duration, "row": row}


def _row(plane: str, line: Any) -> str:
    name = line.display_name or line.name or str(line.id)
    return name if plane == "/host:CPU" else f"{plane} {name}"


def _short(name: str) -> str:
    """Return the name of an operation without what follows it after `#`."""
    return name.partition("#")[0] or "?"


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


ROUNDS = 8


@dataclass(frozen=True)
class Offset:
    """What is added to a rank's clock to get that of rank 0."""

    microseconds: float
    uncertainty: float
    """The true offset is at most so many µs away."""


@dataclass(frozen=True)
class Reading:
    """One comparison: rank 0 read its clock after this rank's was at `before`, and before it was at `after`, in ns."""

    before: int
    after: int
    root: int


def clock_offset(
    control: ControlChannel, host: str, *, timeout: float, clock: Callable[[], int] = time.time_ns
) -> Offset:
    """Return how far this rank's clock is behind that of rank 0; every rank calls it.

    Ranks of one host have one clock. Others enter one exchange after the other: rank 0 reads its clock between two of
    them, after the part of this rank to the first has come, and before its own to the second is here.

    Args:
        control: the channel between the ranks.
        host: this rank's.
        timeout: seconds to wait for the others.
        clock: tells the time in ns.
    """
    hosts = control.exchange(host.encode(), timeout=timeout)
    if len(set(hosts)) == 1:
        return Offset(0.0, 0.0)
    readings, before = [], clock()
    control.exchange(b"", timeout=timeout)
    for _ in range(ROUNDS):
        entered = clock()
        roots = gather(control, clock(), timeout=timeout)
        readings.append(Reading(before, clock(), roots[0]))
        before = entered
    return Offset(0.0, 0.0) if hosts[0] == host.encode() else offset_of(readings)


def offset_of(readings: Sequence[Reading]) -> Offset:
    """Return the offset that fits all readings and is nearest to 0: clocks that may agree are taken to agree."""
    least = max(reading.root - reading.after for reading in readings) / 1000
    most = min(reading.root - reading.before for reading in readings) / 1000
    offset = min(max(0.0, least), most)
    return Offset(offset, max(most - offset, offset - least))


PARTS = ".json"
"""End of the names of ranks' own files."""
FIRST_ROW = "training"
EXCHANGE = "exchange, as rank 0 saw it"
STEP = "step "
LATEST_US = 60e6
"""After the last event of a rank its world may still exchange something: what a rank has left is not drawn."""


@dataclass(frozen=True)
class Part:
    """What one rank has recorded in one world."""

    header: dict[str, Any]
    events: list[dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> "Part | None":
        """Read a rank's file; None if its process was killed before it wrote its name."""
        header, rows, events = None, {}, []
        for event in read_events(path):
            if event["name"] == "process_name":
                header = event["args"]
            elif event["name"] == "thread_name":
                rows[event["tid"]] = event["args"]["name"]
            else:
                kept = {key: value for key, value in event.items() if key not in ("ph", "pid", "tid")}
                events.append({**kept, "row": rows[event["tid"]]})
        return None if header is None else cls(header, events)

    @property
    def name(self) -> str:
        """The rank, as the trace names it."""
        return f"rank {self.header['rank']} ({self.header['host']})"


def parts_folder(file: Path) -> Path:
    """Return the folder beside `file` with what each rank records."""
    return file.with_name(f"{file.name}.parts")


def merge_parts(file: Path) -> dict[str, Overlap]:
    """Write `file` from its folder of parts; return the overlap of each profiled rank, by its name in the trace.

    Raises:
        OSError: it cannot be written.
    """
    found = [Part.read(path) for path in sorted(parts_folder(file).glob(f"rank-*{PARTS}"))]
    parts = sorted((part for part in found if part is not None), key=lambda part: (_world(part), part.header["rank"]))
    ranks = list(_ranks(parts))
    overlaps = {rank.name: shared for rank in ranks if (shared := overlap_of(rank.events, rank.exchanges, STEP))}
    draft = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        stream.write(",\n".join(map(json.dumps, _merged(ranks))))
        stream.write(f'\n], "otherData": {json.dumps(_notes(parts, overlaps))}}}\n')
    os.replace(draft, file)
    return overlaps


def _world(part: Part) -> int:
    return int(part.header["world"])


@dataclass(frozen=True)
class RankRecord:
    """What one rank did in one world, on rank 0's clock."""

    name: str
    """Of its process in the trace."""
    events: list[dict[str, Any]]
    exchanges: list[Exchange]
    """Horovod's messages in which it took part."""
    tensors: list[Exchange]
    """Everything that Horovod recorded; empty on all ranks but the one where it did."""

    def drawn(self) -> Iterator[dict[str, Any]]:
        """Yield the events of its process."""
        yield from self.events
        yield from ({**exchange.event(), "row": EXCHANGE} for exchange in self.exchanges)


def _ranks(parts: Sequence[Part]) -> Iterator[RankRecord]:
    several = len({_world(part) for part in parts}) > 1
    recorded = {_world(part): list(_exchanges(part)) for part in parts if part.header.get("horovod")}
    for part in parts:
        name = part.name + (f", world {_world(part)}" if several else "")
        events = [{**event, "ts": event["ts"] + part.header["offset_us"]} for event in part.events]
        seen = recorded.get(_world(part), [])
        yield RankRecord(name, events, _taken_part(events, seen), seen if part.header.get("horovod") else [])


def _merged(ranks: Sequence[RankRecord]) -> Iterator[dict[str, Any]]:
    begin = min(chain(*(_times(rank) for rank in ranks)), default=0.0)
    for number, rank in enumerate(ranks, start=1):
        yield from _process(number, rank.name, rank.drawn(), begin)
        if rank.tensors:
            tensors = ({**exchange.event(), "row": exchange.tensor} for exchange in rank.tensors)
            yield from _process(1000 + number, f"Horovod's tensors, seen by {rank.name}", tensors, begin)


def _times(rank: RankRecord) -> Iterator[float]:
    """Yield when something began."""
    yield from (event["ts"] for event in rank.events)
    yield from (exchange.begin for exchange in rank.tensors)


def _exchanges(part: Part) -> Iterator[Exchange]:
    """Return what Horovod recorded on this rank, on rank 0's clock."""
    for exchange in read_horovod(Path(part.header["horovod"])):
        yield exchange.shifted(part.header["offset_us"])


def _taken_part(events: Sequence[Mapping[str, Any]], seen: Sequence[Exchange]) -> list[Exchange]:
    """Return the messages in which the rank of these events took part.

    They begin at one time on all ranks. Another rank than 0 may be done earlier: it is with the end of its step.
    """
    steps = sorted((each["ts"], each["ts"] + each["dur"]) for each in events if each["name"].startswith(STEP))
    times = [event["ts"] for event in events]
    joined = _joined(each for each in seen if not each.waits and each.top)
    return [
        _ended_with(steps, exchange)
        for exchange in joined
        if times and min(times) <= exchange.begin <= max(times) + LATEST_US
    ]


def _ended_with(steps: Sequence[tuple[float, float]], exchange: Exchange) -> Exchange:
    """Return `exchange`, which ends at the latest with the one of a rank's steps, by begin and end, that holds it."""
    place = bisect_right(steps, (exchange.begin, math.inf)) - 1
    if place < 0 or steps[place][1] < exchange.begin:
        return exchange
    return replace(exchange, end=min(exchange.end, steps[place][1]))


def _joined(exchanges: Iterable[Exchange]) -> Iterator[Exchange]:
    """Yield as one what Horovod does at the same time: the tensors of one message."""
    last: Exchange | None = None
    for each in sorted(exchanges, key=lambda exchange: exchange.begin):
        if last is not None and each.begin <= last.end:
            last = last.with_another(each)
            continue
        if last is not None:
            yield last
        last = each
    if last is not None:
        yield last


def _process(number: int, name: str, events: Iterable[dict[str, Any]], begin: float) -> Iterator[dict[str, Any]]:
    """Yield the events of a process with their rows, in ms from `begin` on."""
    yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": number, "args": {"sort_index": number}}
    rows: dict[str, int] = {}
    for event in events:
        row = event.pop("row", FIRST_ROW)
        if row not in rows:
            rows[row] = len(rows) + 1
            place = {"pid": number, "tid": rows[row]}
            yield {"ph": "M", "name": "thread_name", **place, "args": {"name": row}}
            order = 0 if row == FIRST_ROW else 1 if row == EXCHANGE else 1 + rows[row]
            yield {"ph": "M", "name": "thread_sort_index", **place, "args": {"sort_index": order}}
        yield {"ph": "X", **event, "ts": round(event["ts"] - begin, 3), "pid": number, "tid": rows[row]}


def _notes(parts: Sequence[Part], overlaps: Mapping[str, Overlap]) -> dict[str, Any]:
    """Return what is to be known of the clocks, and what the exchange cost."""
    clocks = {
        part.name: f"{part.header['offset_us']:.0f} us added, +- {part.header['uncertainty_us']:.0f} us"
        for part in parts
        if part.header["uncertainty_us"]
    }
    notes = {"clocks": clocks or "all ranks have the clock of rank 0", "exchange": EXCHANGE}
    return {**notes, "overlap": {name: asdict(found) for name, found in overlaps.items()}}
