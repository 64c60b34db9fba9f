"""The second gather of a parameter, for the backward pass, put into the graph once both passes are built.

The gradient of a layer is built by TensorFlow, and reads the tensor that the forward pass has read. It would live until
then, and all layers would be whole at once. So each operation that reads it later is given the output of another
gather, which waits until the operations before it that need a whole parameter have run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import tensorflow as tf

from hvdtrain.compat.tensorflow import copy_op, replace_input

MOVING = frozenset({"Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "StridedSlice", "Transpose"})
"""Operations that only rearrange or convert a parameter: their outputs are as large, and are made anew like it."""


@dataclass
class Gather:
    """A parameter that was gathered."""

    whole: tf.Tensor
    again: Callable[[], tf.Tensor]
    """Gathers it once more, in the current graph."""


@dataclass
class Burst:
    """Parameters that are whole at the same time, since the same operations read them."""

    gathers: dict[int, Gather] = field(default_factory=dict)
    """By the id of the variable."""
    end: int | None = None
    """Number of operations in the graph when the next burst began: what reads these parameters later gathers again."""

    def readers(self) -> list[Any]:
        """Return the operations that compute with these parameters, by now."""
        return [use.reader for gather in self.gathers.values() for use in uses_of(gather)]


class Use(NamedTuple):
    """An operation's input that is a parameter, or one that was rearranged."""

    reader: Any
    place: int
    tensor: tf.Tensor
    gather: Gather


@dataclass
class _Run:
    """Consecutive operations of the backward pass that read the parameters of one burst."""

    burst: Burst
    first: int
    """Place of the first of them among the graph's operations."""
    uses: list[Use]


class Scattered(NamedTuple):
    """A gradient that was reduce-scattered: the operation that made it, and the one that made the slice."""

    whole: Any
    slice: Any


def uses_of(gather: Gather) -> Iterator[Use]:
    """Yield what computes with a gathered parameter, by now."""
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
    """Give the operations behind the end of each burst parameters that are gathered for them, one run after another.

    Returns:
        These operations, by the id of the variable that they read. Its slice is best not updated before they have run:
        what was read shares its memory, and TensorFlow would update a copy.

    Args:
        graph: of both passes, complete.
        bursts: in their order.
        scattered: the gradients of these parameters: the next run waits until they are no longer whole.
        prefetch: how many runs ahead parameters are gathered.
    """
    places = {operation.name: place for place, operation in enumerate(graph.get_operations())}
    runs = _runs(bursts, places)
    for number, run in enumerate(runs):
        waits = _arrival(runs[0], bursts, places) if number <= prefetch else []
        if number > prefetch:
            before = runs[number - 1 - prefetch]
            waits = [use.reader for use in before.uses]
            # What was made before the next run begins cannot depend on it.
            limit = runs[number - prefetch].first
            waits += [each.slice for each in scattered if places.get(each.whole.name, limit) < limit]
        _redirect(graph, run, list({operation.name: operation for operation in waits}.values()))
    variables = {id(gather): variable for burst in bursts for variable, gather in burst.gathers.items()}
    readers: dict[int, list[Any]] = {}
    for use in (use for run in runs for use in run.uses):
        readers.setdefault(variables[id(use.gather)], []).append(use.reader)
    return readers


def _runs(bursts: Sequence[Burst], places: dict[str, int]) -> list[_Run]:
    """Return what reads parameters behind the end of their burst, in the order of the graph."""
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
    """Return what a backward pass begins with: the other inputs of the first operation that reads a parameter.

    The gradient of a penalty, such as the sign of a kernel for L1, has none: it begins behind the forward pass.
    """
    reader = run.uses[0].reader
    own = {use.place for use in run.uses if use.reader is reader}
    others = [source.op for place, source in enumerate(reader.inputs) if place not in own]
    others = [operation for operation in others if operation.type != "Const"]
    # By now the last parameters have readers in the backward pass, too: among them those that are to wait.
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
    """Return `tensor`, made from the parameter in `made` as it was made from the first one."""
    if tensor.name not in made:
        old = tensor.op
        inputs = [source if source.op.type == "Const" else _moved(source, made) for source in old.inputs]
        new = copy_op(old, inputs)
        made.update({a.name: b for a, b in zip(old.outputs, new.outputs, strict=True)})
    return made[tensor.name]
