"""Second all-gather of parameters, for the backward pass; inserted once both passes are built.

TensorFlow's gradient of a layer reads the tensor of the forward pass, which would stay alive until then: all layers
would be in memory at once. So each later reader gets the output of another gather, which waits for the preceding
operations that need a full parameter.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.compat.tensorflow import copy_op, replace_input

MOVING = frozenset({"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice", "Transpose"})
"""Operations that only rearrange or convert a parameter: their outputs are as large, and are recomputed."""


@dataclass
class Gather:
    """A gathered parameter."""

    whole: tf.Tensor
    again: Callable[[], tf.Tensor]
    """Gathers it again, in the current graph."""


@dataclass
class Burst:
    """Parameters read by the same operations, thus full simultaneously."""

    gathers: dict[int, Gather] = field(default_factory=dict)
    """By the id of the variable."""
    end: int | None = None
    """Number of operations in the graph when the next burst began: later readers gather again."""

    def readers(self) -> list[Any]:
        """Return the operations that use these parameters so far."""
        return [use.reader for gather in self.gathers.values() for use in uses_of(gather)]


class Use(NamedTuple):
    """An operation's input that is a gathered or rearranged parameter."""

    reader: Any
    place: int
    tensor: tf.Tensor
    gather: Gather


@dataclass
class _Run:
    """Consecutive backward operations that read one burst's parameters."""

    burst: Burst
    first: int
    """Index of the first of them in the graph."""
    uses: list[Use]


class Scattered(NamedTuple):
    """A reduce-scattered gradient: the operations that made the full gradient and the shard."""

    whole: Any
    slice: Any


def uses_of(gather: Gather) -> Iterator[Use]:
    """Yield the uses of a gathered parameter so far."""
    pending, known = [gather.whole], {gather.whole.name}
    seen: set[tuple[str, int]] = set()
    while pending:
        tensor = pending.pop()
        for reader in tensor.consumers():
            if _only_moves(reader, known):
                for output in reader.outputs:
                    if output.name not in known:
                        known.add(output.name)
                        pending.append(output)
                continue
            for place, source in enumerate(reader.inputs):
                if source.name == tensor.name and (reader.name, place) not in seen:
                    seen.add((reader.name, place))
                    yield Use(reader, place, tensor, gather)


def _only_moves(operation: Any, known: set[str]) -> bool:
    return operation.type in MOVING and all(
        source.name in known or source.op.type == "Const" for source in operation.inputs
    )


def gather_again(
    graph: Any, bursts: Sequence[Burst], scattered: Sequence[Scattered], prefetch: int
) -> dict[int, list[Any]]:
    """Re-gather parameters after each burst's end, one run after another.

    Returns these operations, by the id of the variable they read. Its shard should be updated after them: its memory is
    shared with what was read, and TensorFlow would update a copy.

    Args:
        scattered: gradients of these parameters: the next run waits until they are no longer full.
        prefetch: how many runs ahead to gather.
    """
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    runs = _runs(bursts, places)
    for number, run in enumerate(runs):
        waits = _arrival(runs[0], bursts, places) if number <= prefetch else []
        if number > prefetch:
            before = runs[number - 1 - prefetch]
            waits = [use.reader for use in before.uses]
            # Operations before the start of the next run cannot depend on it.
            limit = runs[number - prefetch].first
            waits += [each.slice for each in scattered if places.get(each.whole.name, limit) < limit]
        _redirect(graph, run, list({operation.name: operation for operation in waits}.values()))
    variables = {id(gather): variable for burst in bursts for variable, gather in burst.gathers.items()}
    readers: dict[int, list[Any]] = {}
    for use in (use for run in runs for use in run.uses):
        readers.setdefault(variables[id(use.gather)], []).append(use.reader)
    return readers


def _runs(bursts: Sequence[Burst], places: dict[str, int]) -> list[_Run]:
    """Return the readers after the end of their burst, in graph order."""
    late = [
        (places[use.reader.name], number, use)
        for number, burst in enumerate(bursts)
        for gather in burst.gathers.values()
        for use in uses_of(gather)
        if burst.end is not None and places[use.reader.name] >= burst.end
    ]
    runs: list[_Run] = []
    last = -1
    for place, number, use in sorted(late, key=lambda each: each[:2]):
        # An operation that reads parameters of several bursts needs all of them at once.
        if not runs or (runs[-1].burst is not bursts[number] and place != last):
            runs.append(_Run(bursts[number], place, []))
        runs[-1].uses.append(use)
        last = place
    return runs


def _arrival(run: _Run, bursts: Sequence[Burst], places: Mapping[str, int]) -> list[Any]:
    """Return the other inputs of a parameter's first backward reader.

    The gradient of a penalty, such as the sign of a kernel for L1, has none: it starts after the forward pass.
    """
    reader = run.uses[0].reader
    own = {use.place for use in run.uses if use.reader is reader}
    others = [source.op for place, source in enumerate(reader.inputs) if place not in own]
    others = [operation for operation in others if operation.type != "Const"]
    # The last parameters already have readers in the backward pass, including those that must wait.
    return others or [last for last in bursts[-1].readers() if places[last.name] < run.first]


def _redirect(graph: Any, run: _Run, waits: Sequence[Any]) -> None:
    made: dict[str, tf.Tensor] = {}
    with graph.as_default(), tf.control_dependencies(waits):
        for use in run.uses:
            if use.gather.whole.name not in made:
                made[use.gather.whole.name] = use.gather.again()
    for use in run.uses:
        replace_input(use.reader, use.place, _moved(use.tensor, made))


def _moved(tensor: tf.Tensor, made: dict[str, tf.Tensor]) -> tf.Tensor:
    """Recompute `tensor` from the re-gathered parameter in `made`."""
    if tensor.name not in made:
        old = tensor.op
        inputs = [source if source.op.type == "Const" else _moved(source, made) for source in old.inputs]
        new = copy_op(old, inputs)
        made.update({a.name: b for a, b in zip(old.outputs, new.outputs, strict=True)})
    return made[tensor.name]
