"""What an inspection of data found, and how many records are examined at the same time."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import tensorflow as tf

from hvdtrain.config.errors import UserError
from hvdtrain.data.bad_records import cause_of

Tick = Callable[[int, int], None]
"""Called with how much is done, and how much there is to do."""
AT_ONCE = 512
"""Records that are examined before the next ones are begun, which bounds the memory."""
SHOWN_SHAPES = 3


@dataclass
class Examined:
    """What was seen of one record."""

    place: str
    entries: dict[str, str] = field(default_factory=dict)
    """Type and shape of each entry."""
    problems: list[str] = field(default_factory=list)
    label: str | None = None
    """The class it belongs to."""
    split: str = "records"

    def look(self, entry: str, read: Callable[[], str]) -> None:
        """Note what `read` says of an entry, or why it fails."""
        try:
            self.entries[entry] = read()
        except (UserError, tf.errors.OpError) as error:
            self.problems.append(cause_of(error))


@dataclass
class Report:
    """What data hold."""

    kind: str
    path: str
    facts: dict[str, str] = field(default_factory=dict)
    balance: dict[str, Counter[str]] = field(default_factory=dict)
    """For each class, its records in each split."""
    damaged: list[str] = field(default_factory=list)
    """What is damaged, with its place."""

    def count(self, label: str, split: str, number: int = 1) -> None:
        """Count `number` records of a class."""
        self.balance.setdefault(label, Counter())[split] += number

    def take(self, examined: Iterable[Examined]) -> None:
        """Add what was seen of each record."""
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
    """Examine the records `numbers`, several at a time, and yield what was seen in their order."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for begin in range(0, len(numbers), at_once):
            yield from pool.map(examine, numbers[begin : begin + at_once])
            tick(min(begin + at_once, len(numbers)), len(numbers))


def decoded_image(data: bytes) -> str:
    """Decode an image and return its type and shape.

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
