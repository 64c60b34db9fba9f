"""What a step fetches from other ranks, in words, and when it is said."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.data.batch import Batch
from hvdtrain.partition.partition import Fetch, Partition
from hvdtrain.runtime.logs import LOGGER

MUCH = 0.1
"""Part of the gradients' bytes that a step may fetch without a word."""
MOST_LINES = 5


@dataclass
class FetchNotes:
    """Says once, on the primary, what a step fetches from other ranks, if it is much, or all of it."""

    backend: Backend
    step: str
    parameters: Sequence[tf.Variable]
    explain: bool
    _said: bool = False

    def note(self, partition: Partition, batch: Batch) -> None:
        """Take what a traced step fetches."""
        if self._said or not self.backend.primary:
            return
        self._said = True
        if self.explain:
            lines = _explained(partition.fetches) or ["nothing"]
            LOGGER.info("\n  ".join([f"{self.step} fetches from other ranks:", *lines]))
            return
        exchanged = sum(int(v.shape.num_elements() or 0) * v.dtype.size for v in self.parameters)
        each = _gathered_bytes(partition.fetches)
        samples = 1 if tf.is_tensor(batch.global_samples) else int(batch.global_samples)
        if each * samples <= MUCH * exchanged:
            return
        lines = [line for line in _explained(partition.fetches) if "gathered" in line][:MOST_LINES]
        LOGGER.warning(
            "\n  ".join(
                [
                    f"{self.step} needs samples of other ranks, more than a tenth of what gradients take:",
                    *lines,
                    "Operations along other dims than the samples need none; whole_batch=False computes with each "
                    "rank's own samples alone. explain_step=True lists all.",
                ]
            )
        )


def bytes_of(fetch: Fetch) -> int:
    """Return the size of what a rank sends: of a sample where rows are gathered, else of all."""
    elements = 1
    for size in fetch.shape.as_list() if fetch.shape.rank is not None else ():
        elements *= size or 1
    return elements * fetch.dtype.size


def _explained(fetches: Sequence[Fetch]) -> list[str]:
    """Return a line for each place of the user's code that needs other ranks' samples, the largest first."""
    sizes: dict[tuple[str, str, bool], int] = defaultdict(int)
    for each in fetches:
        sizes[each.cause, each.line, each.gathers] += bytes_of(each)
    found = sorted(sizes.items(), key=lambda item: (not item[0][2], -item[1]))
    return [
        f"{_size(size)}{' a sample' if gathers else ''} {'gathered' if gathers else 'summed'} for {cause}{_at(line)}"
        for (cause, line, gathers), size in found
    ]


def _gathered_bytes(fetches: Sequence[Fetch]) -> int:
    """Return the bytes of a sample that travel to all ranks."""
    return sum(bytes_of(each) for each in fetches if each.gathers)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def _at(line: str) -> str:
    if not line:
        return ""
    file, number = line.rsplit(":", 1)
    return f" ({Path(file).name}:{number})"
