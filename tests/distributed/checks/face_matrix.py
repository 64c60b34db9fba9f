"""Every collective of the face by dtype, operation, execution mode and process set, against NumPy.

The expected values are the formulas of Horovod's documentation over the inputs of all ranks, which every rank can
compute; the dtype of a result is part of what is expected.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from world import World
from worlds import worlds

import hvdtrain.horovod as hvd

INTEGERS = ["uint8", "int8", "int32", "int64"]
FLOATS = ["float16", "bfloat16", "float32", "float64"]
SCATTERED = ["int32", "int64", *FLOATS]
MOVED = [*INTEGERS, *FLOATS, "uint16", "int16", "uint32", "uint64", "bool"]
OPERATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "Sum": lambda parts: parts.sum(0),
    "Average": lambda parts: parts.mean(0),
    "Min": lambda parts: parts.min(0),
    "Max": lambda parts: parts.max(0),
    "Product": lambda parts: parts.prod(0),
}
FACTORS = {"prescale_factor": 0.5, "postscale_factor": 4.0}


@dataclass(frozen=True)
class Case:
    """A call and the values and dtypes of its results."""

    label: str
    call: Callable[[], Any]
    values: list[Any]
    dtypes: list[str]


def eagerly(calls: list[Any]) -> list[Any]:
    return [call() for call in calls]


def compiled(calls: list[Any]) -> Any:
    return tf.function(lambda: [call() for call in calls], autograph=False)()


def in_a_session(calls: list[Any]) -> Any:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        return session.run([call() for call in calls])


MODES = {"eager": eagerly, "tf.function": compiled, "session": in_a_session}


def run(cases: list[Case]) -> None:
    """Run all cases in every mode: within a graph they are under way together."""
    calls = [lambda case=case: [tf.convert_to_tensor(each) for each in tf.nest.flatten(case.call())] for case in cases]
    for mode, execute in MODES.items():
        for case, results in zip(cases, execute(calls), strict=True):
            arrays = [np.asarray(result.numpy() if tf.is_tensor(result) else result) for result in results]
            label = f"{case.label}, {mode}"
            assert [array.dtype.name for array in arrays] == case.dtypes, label
            for array, expected in zip(arrays, case.values, strict=True):
                np.testing.assert_array_equal(array.astype("float64"), expected, err_msg=label)


@contextmanager
def process_sets(world: World) -> Iterator[list[tuple[Any, list[int]]]]:
    """The sets that this rank is part of, with their ranks: all ranks, and those that are even or odd as it is."""
    halves = [hvd.add_process_set(list(range(first, world.size, 2))) for first in (0, 1) if world.size > 1]
    mine = halves[world.rank % 2 :][:1]
    try:
        yield [(hvd.global_process_set, list(range(world.size))), *((half, half.ranks) for half in mine)]
    finally:
        world.gather(b"")
        for half in halves:
            hvd.remove_process_set(half)


def data(rank: int, dtype: str, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    """Small whole numbers that differ by rank and place, some of them negative, exact in every dtype."""
    numbers = np.arange(int(np.prod(shape))).reshape(shape) % 5 + rank + 1.0
    if dtype == "bool":
        return numbers % 2
    return numbers if dtype.startswith("uint") else np.where(numbers % 2, numbers, -numbers)


def tensor(array: np.ndarray, dtype: str) -> tf.Tensor:
    return tf.cast(tf.constant(array), dtype)


def whole(array: np.ndarray, dtype: str) -> np.ndarray:
    """What an integer keeps of a number: as in C, what is behind the point is cut off."""
    return np.trunc(array) if dtype in INTEGERS else array


def reduced(ranks: list[int], op: str, dtype: str, shape: tuple[int, ...] = (3, 2)) -> np.ndarray:
    return whole(OPERATIONS[op](np.stack([data(rank, dtype, shape) for rank in ranks])), dtype)


def scaled_sum(ranks: list[int], dtype: str) -> np.ndarray:
    parts = [whole(data(rank, dtype) * FACTORS["prescale_factor"], dtype) for rank in ranks]
    return whole(sum(parts) * FACTORS["postscale_factor"], dtype)


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-2", "gloo-4", extended=True)
def check_allreduce(world: World) -> None:
    with process_sets(world) as sets:
        run([case for group, ranks in sets for case in allreduce_cases(world.rank, group, ranks)])


def allreduce_cases(me: int, group: Any, ranks: list[int]) -> Iterator[Case]:
    for op in OPERATIONS:
        # The product of more than two ranks' numbers is too large for 8 bits.
        dtypes = SCATTERED if op == "Product" and len(ranks) > 2 else [*INTEGERS, *FLOATS]
        options = {"op": getattr(hvd, op), "process_set": group}
        for dtype in dtypes:
            for shape in ((3, 2), (), (0, 2)):
                x, expected = data(me, dtype, shape), reduced(ranks, op, dtype, shape)
                yield Case(
                    f"allreduce {op} {dtype} {shape} {ranks}",
                    lambda x=x, dtype=dtype, options=options: hvd.allreduce(tensor(x, dtype), **options),
                    [expected],
                    [dtype],
                )
        yield Case(
            f"grouped_allreduce {op} {ranks}",
            lambda options=options, dtypes=dtypes: hvd.grouped_allreduce(
                [tensor(data(me, dtype), dtype) for dtype in dtypes], **options
            ),
            [reduced(ranks, op, dtype) for dtype in dtypes],
            dtypes,
        )
    factors = {**FACTORS, "op": hvd.Sum, "process_set": group}
    for dtype in [*INTEGERS, *FLOATS]:
        yield Case(
            f"allreduce with factors {dtype} {ranks}",
            lambda dtype=dtype: hvd.allreduce(tensor(data(me, dtype), dtype), **factors),
            [scaled_sum(ranks, dtype)],
            [dtype],
        )
        yield Case(
            f"allreduce through float16 {dtype} {ranks}",
            lambda dtype=dtype: hvd.allreduce(
                tensor(data(me, dtype), dtype), op=hvd.Sum, process_set=group, compression=hvd.Compression.fp16
            ),
            [reduced(ranks, "Sum", dtype)],
            [dtype],
        )


def slices(rank: int, dtype: str) -> tf.IndexedSlices:
    """Three rows, of which the last two have one index."""
    return tf.IndexedSlices(tensor(data(rank, dtype), dtype), tf.constant([rank, 8, 8]), tf.constant([9, 2]))


def dense(rank: int, dtype: str) -> np.ndarray:
    table = np.zeros((9, 2))
    np.add.at(table, [rank, 8, 8], data(rank, dtype))
    return table


def divided(dtype: str) -> str:
    """The dtype that TensorFlow divides in: an average of sparse integers is not an integer."""
    return dtype if dtype in FLOATS else "float64" if dtype in ("int32", "int64") else "float32"


@worlds("mpirun-2", "gloo-2", extended=True)
def check_sparse_allreduce(world: World) -> None:
    """Integers average to floats, alone and in groups with dense tensors, whose average is an integer."""
    with process_sets(world) as sets:
        run([case for group, ranks in sets for case in sparse_cases(world.rank, group, ranks)])


def sparse_cases(me: int, group: Any, ranks: list[int]) -> Iterator[Case]:
    dtypes = [*INTEGERS, *FLOATS]
    for op in ("Sum", "Average"):
        options = {"op": getattr(hvd, op), "process_set": group}
        tables = [OPERATIONS[op](np.stack([dense(rank, dtype) for rank in ranks])) for dtype in dtypes]
        kinds = [divided(dtype) if op == "Average" else dtype for dtype in dtypes]
        for dtype, table, kind in zip(dtypes, tables, kinds, strict=True):
            yield Case(
                f"allreduce {op} of slices {dtype} {ranks}",
                lambda dtype=dtype, options=options: hvd.allreduce(slices(me, dtype), **options),
                [table],
                [kind],
            )

        def mixed(options: Any = options) -> list[Any]:
            pairs = [[slices(me, dtype), tensor(data(me, dtype), dtype)] for dtype in dtypes]
            results = hvd.grouped_allreduce([each for pair in pairs for each in pair], **options)
            return [tf.convert_to_tensor(result) for result in results]

        sums = [reduced(ranks, op, dtype) for dtype in dtypes]
        yield Case(
            f"grouped_allreduce {op} of slices and tensors {ranks}",
            mixed,
            [value for pair in zip(tables, sums, strict=True) for value in pair],
            [kind for pair in zip(kinds, dtypes, strict=True) for kind in pair],
        )


@worlds("mpirun-2")
@worlds("gloo-1", "gloo-2", "gloo-4", extended=True)
def check_moves(world: World) -> None:
    """Gathers of unequal parts, broadcasts from every root, and alltoall in equal and unequal parts."""
    with process_sets(world) as sets:
        run([case for group, ranks in sets for case in move_cases(world.rank, group, ranks)])


def parts_of(ranks: list[int], dtype: str, first: int) -> list[np.ndarray]:
    """A part for each rank, with `first` rows on rank 0 and one more on each next rank."""
    return [data(rank, dtype, (rank + first, 2)) for rank in ranks]


def move_cases(me: int, group: Any, ranks: list[int]) -> Iterator[Case]:
    place, size = ranks.index(me), len(ranks)
    for dtype in MOVED:
        for first in (0, 1):  # rank 0 has no rows, or one
            yield Case(
                f"allgather {dtype} {ranks} from {first} rows",
                lambda dtype=dtype, first=first: hvd.allgather(
                    tensor(data(me, dtype, (me + first, 2)), dtype), process_set=group
                ),
                [np.concatenate(parts_of(ranks, dtype, first))],
                [dtype],
            )
        for root in ranks:
            yield Case(
                f"broadcast {dtype} {ranks} from rank {root}",
                lambda dtype=dtype, root=root: hvd.broadcast(tensor(data(me, dtype), dtype), root, process_set=group),
                [data(root, dtype)],
                [dtype],
            )
        yield Case(
            f"alltoall {dtype} {ranks}",
            lambda dtype=dtype: hvd.alltoall(tensor(data(me, dtype, (2 * size, 2)), dtype), process_set=group),
            [np.concatenate([data(rank, dtype, (2 * size, 2))[2 * place : 2 * place + 2] for rank in ranks])],
            [dtype],
        )
        # Rank r sends r + i rows to the ith rank of the set: rank 0 sends nothing to the first.
        starts = {rank: np.cumsum([0, *(rank + i for i in range(size))]) for rank in ranks}
        sent = {rank: data(rank, dtype, (int(starts[rank][-1]), 2)) for rank in ranks}
        yield Case(
            f"alltoall with splits {dtype} {ranks}",
            lambda dtype=dtype, x=sent[me]: hvd.alltoall(
                tensor(x, dtype), tf.constant([me + i for i in range(size)]), process_set=group
            ),
            [
                np.concatenate([sent[rank][starts[rank][place] : starts[rank][place + 1]] for rank in ranks]),
                [rank + place for rank in ranks],
            ],
            [dtype, "int32"],
        )
    yield Case(
        f"grouped_allgather {ranks}",
        lambda: hvd.grouped_allgather([tensor(data(me, d, (me, 2)), d) for d in MOVED], process_set=group),
        [np.concatenate(parts_of(ranks, dtype, 0)) for dtype in MOVED],
        MOVED,
    )


@worlds("mpirun-2", "gloo-2")
@worlds("gloo-1", "gloo-4", extended=True)
def check_reducescatter(world: World) -> None:
    """Rows that the ranks cannot share equally: the first ranks have one more, and of a single row the others none."""
    with process_sets(world) as sets:
        run([case for group, ranks in sets for case in scatter_cases(world.rank, group, ranks)])


def scatter_cases(me: int, group: Any, ranks: list[int]) -> Iterator[Case]:
    def shard(array: np.ndarray) -> np.ndarray:
        return np.array_split(array, len(ranks))[ranks.index(me)]

    for op in ("Sum", "Average"):
        options = {"op": getattr(hvd, op), "process_set": group}
        for dtype in SCATTERED:
            for rows in (3, 1):
                yield Case(
                    f"reducescatter {op} {dtype} {rows} rows {ranks}",
                    lambda rows=rows, dtype=dtype, options=options: hvd.reducescatter(
                        tensor(data(me, dtype, (rows, 2)), dtype), **options
                    ),
                    [shard(reduced(ranks, op, dtype, (rows, 2)))],
                    [dtype],
                )
        yield Case(
            f"grouped_reducescatter {op} {ranks}",
            lambda options=options: hvd.grouped_reducescatter(
                [tensor(data(me, dtype), dtype) for dtype in SCATTERED], **options
            ),
            [shard(reduced(ranks, op, dtype)) for dtype in SCATTERED],
            SCATTERED,
        )
    for dtype in SCATTERED:
        yield Case(
            f"reducescatter with factors {dtype} {ranks}",
            lambda dtype=dtype: hvd.reducescatter(
                tensor(data(me, dtype), dtype), op=hvd.Sum, process_set=group, **FACTORS
            ),
            [shard(scaled_sum(ranks, dtype))],
            [dtype],
        )
