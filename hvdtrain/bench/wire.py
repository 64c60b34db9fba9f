"""Bytes of gradients on the wire, by formula; pure functions."""

from collections.abc import Sequence

from hvdtrain.bench.results import GradientSize
from hvdtrain.bench.sides import Traffic

SMALL_TABLE_BYTES = 64 * 1024
"""Tables up to this size are sent dense (hvdtrain/gradients/sparse.py)."""

FORMULA = (
    "Bytes that a process sends for the gradients of one step, by formula and not measured; n processes. Ring "
    "all-reduce of S bytes: 2 (n - 1) / n S (Patarasuk and Yuan 2009), which is the least any algorithm can send; MPI "
    "may choose another. Rows of embeddings that are gathered: (n - 1) times a process's own rows with their indices, "
    "duplicates counted. hvdtrain reduces tables of up to 64 KB, and larger ones where that is less; a plain loop "
    "gathers always. Parameter server: a worker receives S and sends S, of sparse gradients rows alone. Replicas "
    "within one process send nothing."
)


def sent_bytes(
    gradients: Sequence[GradientSize], *, traffic: Traffic, processes: int, samples: int, gathers: bool
) -> float | None:
    """Return the bytes that one process sends in a step; see `FORMULA`.

    Args:
        gradients: sizes of the gradients.
        traffic: how they travel.
        processes: number of processes, n.
        samples: samples of a process per step, which determine the rows of embeddings touched.
        gathers: whether rows are always gathered, as in a plain loop.

    Returns None if replicas share a process.
    """
    if traffic == "none":
        return None
    return sum(
        _sent(gradient, traffic=traffic, n=processes, samples=samples, gathers=gathers) for gradient in gradients
    )


def _sent(gradient: GradientSize, traffic: Traffic, n: int, samples: int, gathers: bool) -> float:
    rows = None if gradient.rows_per_sample is None else gradient.rows_per_sample * samples * gradient.row_bytes
    if traffic == "server":
        return min(gradient.bytes, rows) if rows is not None else gradient.bytes
    dense = 2.0 * (n - 1) / n * gradient.bytes
    if rows is None or (gradient.bytes <= SMALL_TABLE_BYTES and not gathers):
        return dense
    gathered = (n - 1) * rows
    return gathered if gathers else min(gathered, dense)
