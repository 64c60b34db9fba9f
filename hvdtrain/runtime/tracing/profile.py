"""What TensorFlow's profiler has seen, as events of a trace.

TensorFlow itself brings the format of the file, so that no further package is needed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
