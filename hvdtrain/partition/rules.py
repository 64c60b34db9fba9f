"""What operations make of tensors of which a rank holds rows or parts: one table, by the type of the operation.

A rule is given an operation before it is made, and returns the inputs to make it of, converted where it has to be, with
the kinds of its outputs; or the operation that stands for it. What has no rule is given whole tensors, which is always
right and only costs.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from hvdtrain.compat.tensorflow import record_gradient_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.partition.kinds import OPAQUE, SLICE, Kind, Opaque, Part, Reduction, Rows, Sizes, Slice
from hvdtrain.partition.partition import Partition, spelled
from hvdtrain.partition.sizes import static, values_of


class Outputs(NamedTuple):
    """Tensors that stand for the outputs of an operation that need not be made, with their kinds."""

    tensors: list[tf.Tensor]
    kinds: list[Kind]


class Finished(NamedTuple):
    """An operation of which others make the outputs, once it is made."""

    inputs: list[Any]
    outputs: Callable[[Any], list[tf.Tensor]]


class Call(NamedTuple):
    """An operation that is about to be made."""

    partition: Partition
    type: str
    inputs: list[Any]
    attrs: Mapping[str, Any]

    @property
    def kinds(self) -> list[Kind]:
        """How this rank holds each input; whole tensors of known integers count as whole."""
        found = [self.partition.kind(each) for each in self.inputs]
        return [None if isinstance(each, Sizes) else each for each in found]

    def flag(self, name: str) -> bool:
        """Return a boolean attribute."""
        return bool(self.attrs[name].b) if name in self.attrs else False


Made: TypeAlias = tuple[list[Any], Sequence[Kind]]
Rule: TypeAlias = Callable[[Call], "Made | Outputs | Finished"]


def whole(call: Call) -> Made:
    """Make an operation of whole tensors."""
    return [call.partition.whole(each) for each in call.inputs], []


def local(call: Call) -> Made:
    """Make an operation of what this rank has."""
    return call.inputs, []


def assertion(call: Call) -> Made:
    """Check this rank's rows: all samples are right where those of each rank are."""
    pairs = zip(call.inputs, call.kinds, strict=True)
    return [
        each if isinstance(kind, Rows) or kind == Part("min") else call.partition.whole(each) for each, kind in pairs
    ], []


def opaque(call: Call) -> Made:
    """Make an operation of a unit. Gradients of a variable that others use, too, are added to parts."""
    kinds = call.kinds
    if "Random" in call.type:
        raise ConfigError(
            f"{call.type} draws random numbers in a layer whose operations are not looked at, for each rank the same: "
            "pass whole_batch=False, by which each rank's step is computed for its own samples alone."
        )
    if call.type == "AddN" and call.partition.is_outside and not all(isinstance(each, Opaque) for each in kinds):
        return [
            each if isinstance(kind, Opaque) else call.partition.part(each)
            for each, kind in zip(call.inputs, kinds, strict=True)
        ], [Part()]
    return call.inputs, [OPAQUE] * 256


_OF_SLICES = ("Identity", "AddN", "AddV2", "Neg", "Mul", "RealDiv", "Cast")


def of_slices(call: Call) -> Made:
    """Make an operation of slices of gradients, and of numbers, for each element; refuse others."""
    p = call.partition
    inputs = [
        each if isinstance(kind, Slice) else p.whole(each) for each, kind in zip(call.inputs, call.kinds, strict=True)
    ]
    slices = [each for each in inputs if isinstance(p.kind(each), Slice)]
    if call.type not in _OF_SLICES or any(each.shape.rank != 0 for each in inputs if p.kind(each) is None):
        p.whole(slices[0])
    return inputs, [SLICE]


def moving(rule: Rule) -> Rule:
    """Return the rule of operations that move or repeat elements of their first input: of a part, they give a part."""

    def rule_of_rows(call: Call) -> "Made | Outputs | Finished":
        if not isinstance(call.kinds[0], Part):
            return rule(call)
        return [call.inputs[0], *map(call.partition.whole, call.inputs[1:])], [call.kinds[0]]

    return rule_of_rows


def unit(rule: Rule, *, never_empty: bool = False) -> Rule:
    """Return the rule of operations whose gradients are computed by operations that need no look, either.

    Those that are `never_empty` are given a row of zeros where a rank has none.
    """

    def apart(call: Call) -> "Made | Outputs | Finished":
        p, made = call.partition, rule(call)
        if isinstance(made, Outputs | Finished) or not any(isinstance(kind, Rows) for kind in made[1]):
            return made
        inputs, kinds = made
        if any(not isinstance(p.kind(each), Rows) and not each.dtype.is_integer for each in inputs):
            return made  # the others have gradients, which are no rows

        def closed(op: Any) -> list[tf.Tensor]:
            for output in op.outputs:
                p.mark(output, OPAQUE)
            record_gradient_of(op)
            pairs: Any = zip(op.outputs, kinds, strict=False)
            return [p.closed(_unfilled(p, each, kind) if never_empty else each, kind) for each, kind in pairs]

        def opened(tensor: tf.Tensor) -> tf.Tensor:
            kind = p.kind(tensor)
            if not isinstance(kind, Rows):
                return tensor
            return _filled(p.opened(tensor), kind.dim) if never_empty else p.opened(tensor)

        return Finished([opened(each) for each in inputs], closed)

    return apart


def zero_of_none(rule: Rule) -> Rule:
    """Return the rule of sums over the rows that TensorFlow does not set where there are none."""

    def set_by(call: Call) -> "Made | Outputs | Finished":
        made = rule(call)
        if isinstance(made, Outputs | Finished) or Part() not in made[1]:
            return made
        return Finished(made[0], lambda op: [call.partition.zero_of_none(record_gradient_of(op).outputs[0])])

    return set_by


def _filled(tensor: tf.Tensor, dim: int) -> tf.Tensor:
    """Return a tensor of a unit with a row of zeros along `dim` if it has none."""
    more = tf.one_hot(dim, tensor.shape.rank, tf.maximum(1 - tf.shape(tensor)[dim], 0), 0)
    return tf.pad(tensor, tf.stack([tf.zeros_like(more), more], 1))


def _unfilled(p: Partition, tensor: tf.Tensor, kind: Rows) -> tf.Tensor:
    return tensor[(*[slice(None)] * kind.dim, slice(p.local_length(kind.per)))]


def linear_parts(call: Call) -> list[int]:
    """Return the indices of inputs that are parts of sums, and whose sums are not here yet."""
    return [
        index
        for index, (each, kind) in enumerate(zip(call.inputs, call.kinds, strict=True))
        if isinstance(kind, Part) and kind.is_linear and not call.partition.has_whole(each)
    ]


# Elementwise


def elementwise(call: Call) -> Made:
    """Broadcast inputs elementwise: those without rows are cut where they have a row for each sample."""
    p = call.partition
    inputs = [
        each if isinstance(kind, Rows) else p.whole(each) for each, kind in zip(call.inputs, call.kinds, strict=True)
    ]
    kinds = [p.kind(each) for each in inputs]
    if not any(isinstance(each, Rows) for each in kinds):
        return inputs, []
    ranks = [each.shape.rank for each in inputs]
    if None in ranks:
        return whole(call)
    rank = max(ranks)
    # Of several, rows of the tensor with most dims; others are gathered where they lie along another dim.
    chosen = max(
        (index for index, kind in enumerate(kinds) if isinstance(kind, Rows)), key=lambda index: (ranks[index], -index)
    )
    like = kinds[chosen]
    assert isinstance(like, Rows)
    from_end = ranks[chosen] - like.dim
    for index, each in enumerate(inputs):
        dim = ranks[index] - from_end
        if dim < 0 or each.shape[dim] == 1:
            inputs[index] = p.whole(each)
        elif index != chosen:
            inputs[index] = p.rows(each, like.at(dim))
    return inputs, [like.at(rank - from_end)] * 4


def additive(call: Call) -> Made:
    """Add: parts stay parts, beside whole tensors, too."""
    p, kinds = call.partition, call.kinds
    if any(isinstance(each, Rows) for each in kinds) or not linear_parts(call):
        return elementwise(call)
    return [p.part(each) for each in call.inputs], [Part()]


def multiplicative(call: Call) -> Made:
    """Multiply: one factor may be a part."""
    if any(isinstance(each, Rows) for each in call.kinds) or not linear_parts(call):
        return elementwise(call)
    return _of_one_part(call)


def _of_one_part(call: Call) -> Made:
    """Multiply a part by what is whole."""
    p, kept = call.partition, linear_parts(call)[0]
    return [p.part(each) if index == kept else p.whole(each) for index, each in enumerate(call.inputs)], [Part()]


def quotient(call: Call) -> Made:
    """Divide: the numerator may be a part."""
    p, kinds = call.partition, call.kinds
    if any(isinstance(each, Rows) for each in kinds) or 0 not in linear_parts(call):
        return elementwise(call)
    return [p.part(call.inputs[0]), p.whole(call.inputs[1])], [Part()]


def selection(call: Call) -> Made:
    """Select: of two parts, by a whole condition, a part."""
    p, kinds = call.partition, call.kinds
    if any(isinstance(each, Rows) for each in kinds) or not {1, 2}.intersection(linear_parts(call)):
        return elementwise(call)
    return [p.whole(call.inputs[0]), *(p.part(each) for each in call.inputs[1:])], [Part()]


def linear(call: Call) -> Made:
    """Map one input elementwise and linearly."""
    if linear_parts(call) == [0]:
        return [call.partition.part(call.inputs[0])], [Part()]
    return elementwise(call)


def cast(call: Call) -> Made:
    """Convert: parts stay parts if no digits are lost that their sum would have."""
    to = tf.as_dtype(call.attrs["DstT"].type)
    given = call.inputs[0].dtype
    keeps = to.is_floating and (given.is_integer or (given.is_floating and to.size >= given.size))
    return linear(call) if keeps or to == given else elementwise(call)


def unchanged(call: Call) -> Made:
    """Pass tensors on as they are held, each by itself."""
    return call.inputs, [call.partition.kind(each) for each in call.inputs]


def ensure_shape(call: Call) -> Made:
    """Check a shape, unless it names the number of rows."""
    kind = call.kinds[0]
    wanted = tf.TensorShape(call.attrs["shape"].shape)
    named = isinstance(kind, Rows) and wanted.rank is not None and wanted[kind.dim] is not None
    return whole(call) if named else unchanged(call)


def ones(call: Call) -> "Made | Outputs":
    """Make ones or zeros: whole, of a part."""
    kind = call.kinds[0]
    return (call.inputs, [kind]) if isinstance(kind, Rows) else (call.inputs, [])


def stacked(*dims: int) -> Rule:
    """Return the rule of operations on stacks: of each of the first inputs, the last `dims`; the others are whole."""

    def rule(call: Call) -> Made:
        p, ranks = call.partition, [each.shape.rank for each in call.inputs[: len(dims)]]
        if None in ranks:
            return whole(call)
        stacks = [rank - own for rank, own in zip(ranks, dims, strict=True)]
        most, pairs = max(stacks), list(zip_longest(call.inputs, stacks))
        like = next((kind for each, stack in pairs if stack == most and isinstance(kind := p.kind(each), Rows)), None)
        # Those with fewer dims are stretched over the rows.
        if like is None or like.dim >= most or any(0 < most - each <= like.dim for each in stacks):
            return whole(call)
        return [p.rows(each, like) if stack == most else p.whole(each) for each, stack in pairs], [like] * 4

    return rule


# Reductions and products


def reduction(kind: Reduction) -> Rule:
    """Return the rule of a reduction: over the rows it gives a part."""

    def rule(call: Call) -> Made:
        p, held, rank = call.partition, call.kinds[0], call.inputs[0].shape.rank
        if isinstance(held, Part):
            if held.is_linear and kind in ("sum", "mean") and not p.has_whole(call.inputs[0]):
                return [p.part(call.inputs[0]), p.whole(call.inputs[1])], [Part()]
            return whole(call)
        axes = static(p, call.inputs[1])
        if not isinstance(held, Rows) or axes is None or rank is None:
            return whole(call)
        axes = [axis % rank for axis in axes]
        if held.dim in axes:
            return call.inputs, [Part(kind)]
        keeps = call.flag("keep_dims")
        return call.inputs, [held if keeps else held.at(held.dim - sum(axis < held.dim for axis in axes))]

    return rule


def contraction(call: Call, labels: Sequence[Sequence[Any]], result: Sequence[Any]) -> Made:
    """Multiply and contract tensors whose dims have labels: a contraction over rows gives a part."""
    p, kinds = call.partition, call.kinds
    split = [labels[index][kind.dim] for index, kind in enumerate(kinds) if isinstance(kind, Rows)]
    if not split:
        return _of_one_part(call) if linear_parts(call) else whole(call)
    # A label that two inputs share; else that of the first.
    label = next((each for each in split if split.count(each) > 1), split[0])
    like = next(kind for index, kind in enumerate(kinds) if isinstance(kind, Rows) and labels[index][kind.dim] == label)
    inputs = []
    for each, dims in zip(call.inputs, labels, strict=True):
        if label in dims and each.shape[dims.index(label)] != 1:
            inputs.append(p.rows(each, like.at(dims.index(label))))
        else:
            inputs.append(p.whole(each))
    return inputs, [like.at(list(result).index(label)) if label in result else Part()]


def matmul(call: Call) -> Made:
    """Multiply matrices."""
    first = ["k", "m"] if call.flag("transpose_a") else ["m", "k"]
    second = ["n", "k"] if call.flag("transpose_b") else ["k", "n"]
    return contraction(call, [first, second], ["m", "n"])


def batch_matmul(call: Call) -> Made:
    """Multiply stacks of matrices, which broadcast."""
    ranks = [each.shape.rank for each in call.inputs]
    if None in ranks:
        return whole(call)
    first = ["k", "m"] if call.flag("adj_x") else ["m", "k"]
    second = ["n", "k"] if call.flag("adj_y") else ["k", "n"]
    stack = list(range(-(max(ranks) - 2), 0))
    labels = [[*stack[len(stack) - (rank - 2) :], *last] for rank, last in zip(ranks, (first, second), strict=True)]
    return contraction(call, labels, [*stack, "m", "n"])


def einsum(call: Call) -> Made:
    """Contract by an equation."""
    equation = call.attrs["equation"].s.decode()
    inputs, result = equation.replace(" ", "").split("->")
    labels: list[list[Any]] = []
    longest = max((each.shape.rank or 0) for each in call.inputs)
    for text, tensor in zip(inputs.split(","), call.inputs, strict=True):
        if tensor.shape.rank is None:
            return whole(call)
        labels.append(_spelled(text, tensor.shape.rank, longest))
    if any(len(set(each)) != len(each) for each in labels):  # a diagonal
        return whole(call)
    stack = sorted({each for found in labels for each in found if isinstance(each, int)})
    letters: list[Any] = []
    for each in result.replace("...", "."):
        letters += stack if each == "." else [each]
    return contraction(call, labels, letters)


def _spelled(text: str, rank: int, longest: int) -> list[Any]:
    """Return a label for each dim; those of an ellipsis are negative numbers, as they broadcast from the right."""
    if "..." not in text:
        return list(text)
    before, after = text.split("...")
    count = rank - len(before) - len(after)
    return [*before, *range(-count, 0), *after]


def squared_norm(call: Call) -> Made:
    """Add up squares."""
    return (call.inputs, [Part()]) if isinstance(call.kinds[0], Rows) else whole(call)


def bias_gradient(call: Call) -> Made:
    """Add up all but the channels."""
    kind, rank = call.kinds[0], call.inputs[0].shape.rank
    channels = 1 if call.attrs["data_format"].s == b"NCHW" else rank - 1 if rank else None
    if isinstance(kind, Part) and kind.is_linear:
        return [call.partition.part(call.inputs[0])], [Part()]
    if not isinstance(kind, Rows) or channels is None or kind.dim == channels:
        return whole(call)
    return call.inputs, [Part()]


def segments(reduction: Reduction) -> Rule:
    """Return the rule of sums over segments that numbers name: of rows, a part."""

    def rule(call: Call) -> Made:
        p = call.partition
        data, places, count = call.inputs
        like = next((each for each in call.kinds[:2] if isinstance(each, Rows) and each.dim == 0), None)
        if like is None or (places.shape.rank or 0) < 1:
            return whole(call)
        return [p.rows(data, like), p.rows(places, like), p.whole(count)], [Part(reduction)]

    return rule


def scatter(call: Call) -> Made:
    """Add rows to zeros at places that numbers name."""
    p = call.partition
    like = next((each for each in call.kinds[:2] if isinstance(each, Rows) and each.dim == 0), None)
    shape = values_of(p, call.inputs[2])
    if like is None or (call.inputs[0].shape.rank or 0) < 2 or (shape is not None and shape.counts):
        return whole(call)
    return [p.rows(call.inputs[0], like), p.rows(call.inputs[1], like), p.whole(call.inputs[2])], [Part()]


# Images and other samples along dim 0


def samples(rows: Sequence[int], *, sizes: int | None = None, makes: Sequence[Kind] = (Rows(),) * 3) -> Rule:
    """Return the rule of operations with a sample in each row of dim 0.

    Args:
        rows: indices of inputs with samples.
        sizes: index of an input that is a shape of samples.
        makes: kinds of the outputs.
    """

    def rule(call: Call) -> Made:
        p, kinds = call.partition, call.kinds
        like = next((kinds[index] for index in rows if isinstance(kinds[index], Rows)), None)
        if not isinstance(like, Rows) or like.dim != 0:
            return whole(call)
        inputs = [p.rows(each, like) if index in rows else p.whole(each) for index, each in enumerate(call.inputs)]
        if sizes is not None:
            inputs[sizes] = _with_rows(p, call.inputs[sizes], like)
        return inputs, [like if isinstance(each, Rows) else each for each in makes]

    return rule


def _with_rows(p: Partition, shape: tf.Tensor, like: Rows) -> tf.Tensor:
    """Return a shape of samples with this rank's rows along dim 0, also where it is that of a whole tensor."""
    known = values_of(p, shape)
    with p.plain():
        others = shape[1:] if known is None else tf.stack(spelled(shape, known)[1:])
        return tf.concat([[tf.cast(p.local_length(like.per), shape.dtype)], others], 0)
