"""Bytes that this machine sends to itself in a step of a run: what its ranks exchange over Gloo. No TensorFlow."""

import json
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_LOOK_S = 0.005
"""A reading is late by this at most: 1 % of a step of 0.5 s."""


class LoopbackCounter:
    """Reads the machine's counter whenever a run logs a step, while it is entered as a context.

    What ranks tell one another as they start and end is left out so.

    Args:
        metrics: the run's metrics.jsonl, which need not exist yet.
    """

    def __init__(self, metrics: Path) -> None:
        self._metrics = metrics
        self._readings: dict[int, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, name="loopback counter", daemon=True)

    def __enter__(self) -> "LoopbackCounter":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def bytes_per_step(self) -> float | None:
        """Return the mean between the first and the last logged step; None if no two were told apart."""
        first, last = min(self._readings, default=0), max(self._readings, default=0)
        return (self._readings[last] - self._readings[first]) / (last - first) if first < last else None

    def _read(self) -> None:
        while not self._ended.wait(_LOOK_S):
            sent = sent_to_itself()
            newest = max(logged_steps(self._metrics), default=0)
            if newest:  # of several that were logged since the last look, the reading is that of the newest
                self._readings.setdefault(newest, sent)


def logged_steps(metrics: Path) -> list[int]:
    """Return the steps that a metrics.jsonl has a record of by now."""
    with suppress(OSError, ValueError):
        records = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
        return [int(record["step"]) for record in records if record["kind"] == "step"]
    return []


def sent_to_itself() -> int:
    """Return the bytes that this machine has sent on its loopback; 0 where the system does not tell."""
    try:
        lines = Path("/proc/net/dev").read_text(encoding="utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:")), 0)
