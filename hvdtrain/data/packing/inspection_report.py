"""The report of an inspection, and its thread pool."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tensorflow as tf

from hvdtrain.config.errors import UserError
from hvdtrain.data.bad_records import cause_of

Tick = Callable[[int, int], None]
"""Called with the numbers of records done and in all."""
AT_ONCE = 512
"""Records in flight, which bounds the memory."""
SHOWN_SHAPES = 3


@dataclass
class Examined:
    """Findings about one record."""

    place: str
    entries: dict[str, str] = field(default_factory=dict)
    """Dtype and shape of each feature."""
    problems: list[str] = field(default_factory=list)
    label: str | None = None
    """Its class."""
    split: str = "records"

    def look(self, entry: str, read: Callable[[], str]) -> None:
        """Record the description that `read` returns for a feature, or the error it raises."""
        try:
            self.entries[entry] = read()
        except (UserError, tf.errors.OpError) as error:
            self.problems.append(cause_of(error))


@dataclass
class Report:
    """Contents and damage of data."""

    kind: str
    path: str
    facts: dict[str, str] = field(default_factory=dict)
    balance: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of records by class and split."""
    damaged: list[str] = field(default_factory=list)
    """Damaged records, with their position and cause."""

    def count(self, label: str, split: str, number: int = 1) -> None:
        """Add `number` records of a class."""
        self.balance.setdefault(label, Counter())[split] += number

    def take(self, examined: Iterable[Examined]) -> None:
        """Add the findings about each record."""
        shapes: dict[str, Counter[str]] = {}
        for one in examined:
            for entry, shape in one.entries.items():
                shapes.setdefault(entry, Counter())[shape] += 1
            if one.label is not None:
                self.count(one.label, one.split)
            self.damaged += [text if one.place in text else f"{one.place}: {text}" for text in one.problems]
        self.facts |= {entry: _listed(counts) for entry, counts in sorted(shapes.items())}


def in_threads(
    examine: Callable[[int], Examined], numbers: Sequence[int], tick: Tick, at_once: int = AT_ONCE
) -> Iterator[Examined]:
    """Examine the records `numbers` in threads, and yield the findings in order."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for begin in range(0, len(numbers), at_once):
            yield from pool.map(examine, numbers[begin : begin + at_once])
            tick(min(begin + at_once, len(numbers)), len(numbers))


def decoded_image(data: bytes) -> str:
    """Decode an image and describe its dtype and shape.

    Raises:
        tf.errors.OpError: it cannot be decoded.
    """
    image = tf.io.decode_image(data, expand_animations=False)
    return f"image {image.dtype.name} {image.shape.as_list()}"


def _listed(counts: Counter[str]) -> str:
    if len(counts) == 1:
        return next(iter(counts))
    shown = [f"{shape} ({count:,})" for shape, count in counts.most_common(SHOWN_SHAPES)]
    return ", ".join([*shown, *([f"{len(counts) - SHOWN_SHAPES} others"] if len(counts) > SHOWN_SHAPES else [])])
