"""What a step with the whole batch fetches for each function of Keras, which a table of docs/keras_support.md says.

`python -m tests.distributed.zoo.operations` writes it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.partition.kinds import Rows
from hvdtrain.partition.partition import Fetch
from hvdtrain.partition.step import open_rows, partition_of, whole_nest
from hvdtrain.partition.tracing import traced
from tests.distributed.keras_operations import NO_TENSORS, OPERATIONS, OVER_BATCH
from tests.distributed.partition_cases import Case, computed, values_for

PAGE = Path(__file__).parents[3] / "docs" / "keras_support.md"
BEGIN, END = "<!-- written by tests/distributed/zoo/operations.py -->\n", "<!-- end of functions -->\n"
SAMPLES = 4
FAILS = "raises in Keras, too"
KINDS = ("nothing", "sums of the batch", "samples for its gradient", "samples", FAILS)
"""What is fetched, in words."""


class OneRank:
    """Collectives of one rank, by which a step is traced in one process."""

    index, size = 0, 1

    def all_gather(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        return tf.identity(tensor)

    def all_reduce(self, tensor: tf.Tensor, **options: Any) -> tf.Tensor:
        return tf.identity(tensor)


class OnRank:
    """A case as a step computes it on this rank, of its rows.

    Args:
        total: samples of the batch, if known while it is traced.
    """

    def __init__(self, collectives: Any, case: Case, total: int | None = None) -> None:
        self._collectives, self._case, self._total = collectives, case, total
        self.forward: Sequence[Fetch] = ()
        self.backward: Sequence[Fetch] = ()

    def __call__(self, *tensors: Any) -> Any:
        """Return the true values of the results and their gradients."""
        rows = len(self._case.rows)
        opened = [open_rows(each) for each in tensors[:rows]]
        partition = partition_of(self._collectives, opened[0], total=self._total)
        for each in opened:
            partition.mark(each, Rows())

        def function(*given: Any) -> Any:
            value = self._case.function(*given)
            self.forward = tuple(partition.fetches)
            return value

        with traced(partition):
            found = computed(replace(self._case, function=function), *opened, *tensors[rows:])
            self.backward = tuple(partition.fetches[len(self.forward) :])
            partition.cause = "results"
            return whole_nest(partition, found)

    @property
    def kind(self) -> str:
        """What was fetched, in words."""
        if _gathers(self.forward):
            return "samples"
        if _gathers(self.backward):
            return "samples for its gradient"
        return "sums of the batch" if self.forward or self.backward else "nothing"


def _gathers(fetches: Sequence[Fetch]) -> bool:
    """Return whether rows are gathered, or as many sums as there are samples."""
    return any(each.gathers or each.shape.num_elements() is None for each in fetches)


def kind_of(case: Case) -> str:
    """Trace a case, and return what it fetches."""
    values = [tf.constant(each) for each in values_for(case, SAMPLES)]

    def plainly(*tensors: Any) -> Any:
        rows = len(case.rows)
        return computed(case, *map(open_rows, tensors[:rows]), *tensors[rows:])

    try:
        tf.function(plainly, autograph=False).get_concrete_function(*values)
    except Exception:
        return FAILS
    step = OnRank(OneRank(), case, SAMPLES)
    tf.function(step.__call__, autograph=False).get_concrete_function(*values)
    return step.kind


def lines() -> Iterator[str]:
    """Yield a row for each kind."""
    keras.config.set_floatx("float64")
    found = [{name: kind_of(case) for name, case in table.items()} for table in (OPERATIONS, OVER_BATCH)]
    yield "| it fetches | for functions along dims of a sample | along the samples |"
    yield "|---|---|---|"
    for kind in KINDS:
        columns = [", ".join(_short(name) for name in sorted(kinds) if kinds[name] == kind) for kinds in found]
        yield f"| {kind} | {' | '.join(columns)} |"
    yield ""
    by_reason: dict[str, list[str]] = {}
    for name, reason in NO_TENSORS.items():
        by_reason.setdefault(reason, []).append(_short(name))
    yield "Not compared: " + "; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()) + "."


def _short(name: str) -> str:
    return f"`{name.removeprefix('ops.')}`"


def kinds_on_page(kind: str, *, over_batch: bool) -> set[str]:
    """Return the functions that the page names for a kind."""
    page = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    row = next(line for line in page.splitlines() if line.startswith(f"| {kind} |"))
    names = row.split("|")[3 if over_batch else 2].replace("`", "").replace(" ", "").split(",")
    return {name if name.startswith("random.") else f"ops.{name}" for name in names if name}


def written(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END + after


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
