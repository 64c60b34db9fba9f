"""What a step fetches from other ranks, in words."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from hvdtrain.partition.partition import Fetch


def bytes_of(fetch: Fetch) -> int:
    """Return the size of what a rank sends: of a sample where rows are gathered, else of all."""
    elements = 1
    for size in fetch.shape.as_list() if fetch.shape.rank is not None else ():
        elements *= size or 1
    return elements * fetch.dtype.size


def explained(fetches: Sequence[Fetch]) -> list[str]:
    """Return a line for each place of the user's code that needs other ranks' samples, the largest first."""
    sizes: dict[tuple[str, str, bool], int] = defaultdict(int)
    for each in fetches:
        sizes[each.cause, each.line, each.gathers] += bytes_of(each)
    found = sorted(sizes.items(), key=lambda item: (not item[0][2], -item[1]))
    return [
        f"{_size(size)}{' a sample' if gathers else ''} {'gathered' if gathers else 'summed'} for {cause}{_at(line)}"
        for (cause, line, gathers), size in found
    ]


def gathered_bytes(fetches: Sequence[Fetch]) -> int:
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
