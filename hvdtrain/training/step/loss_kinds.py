"""Tell numbers of a step that are means over its samples from sums."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.compat.keras import (
    compiled_losses,
    divisor_of,
    flatten_layers,
    function_of_loss,
    losses_by_output,
    module_of_losses,
)
from hvdtrain.config.errors import ConfigError
from hvdtrain.data.batch import Batch, part_of, rows_of, samples_in
from hvdtrain.runtime.compiled import run_once
from hvdtrain.state.variables import unwrap
from hvdtrain.training.step.batches import number_of_samples, reads_outputs
from hvdtrain.training.step.logs import StepLogs, metrics_of
from hvdtrain.training.step.loss_terms import (
    MEANS,
    Gradients,
    Kind,
    Kinds,
    LossTerms,
    averaging,
    differentiating,
    means_of,
    refusal_of_number,
    trained_ids,
)
from hvdtrain.training.step.patches import active, replaced

TOLERANCE = 0.25
"""Deviation from 1 or 2 where a step draws random numbers, as dropout does: others for twice the samples."""
EXACT = 1e-2
"""Deviation where it draws none, in 16 bits, too."""
_ROUNDING = 1e-4
"""Deviation of a number that Keras computes in 32 bits."""
_CODES: Sequence[Kind | None] = ("mean", "sum", None)
_DIVIDED = "divided"
"""Name of a loss that is divided by its own weights."""
_HIDDEN = "hidden"
"""Name of a number that is formed in an inner function."""


class _Number(NamedTuple):
    """A number that a step forms."""

    role: str
    """Field of `Kinds`."""
    name: str
    value: tf.Tensor | float


def kinds_of(
    model: Any, batch: Batch, step: Callable[..., Any], logs: StepLogs, replicas: Backend
) -> tuple[Kinds, list[str]]:
    """Return the kinds of the numbers that `step` forms, and warnings of those that are of neither kind. Collective.

    Each is computed for half a batch, and for twice the same samples: a mean stays, a sum doubles. Anything else, such
    as a loss over pairs of samples, depends on which samples are together. A mean over all pairs stays, too: it is not
    the mean of those of the batch's halves.

    Args:
        step: computes a batch as in training, without changing weights; `noted` is given what optimizers apply.
        logs: tells metrics' results from other numbers.
        replicas: agree on the kinds.

    Raises:
        ConfigError: a layer adds a loss that is neither, and cannot be put together from those of slices.
    """
    formed: list[_Number] = []
    batch = batch._replace(has_samples=1.0)

    def numbers(batch: Batch, total: tf.Tensor) -> list[tf.Tensor]:
        formed[:] = _formed(model, batch, total=total, step=step, logs=logs)
        return [tf.cast(each.value, tf.float64) for each in formed]

    compute = tf.function(numbers, autograph=False)
    graph = compute.get_concrete_function(batch, 2 * number_of_samples(batch)).graph
    if exchanges(graph):
        return Kinds(exchanged=True), []
    half = part_of(batch, lambda count: (0, max(1, count // 2)))  # twice a batch may not fit in memory
    if not formed or half is None:
        return MEANS, []
    total = 2 * number_of_samples(half)
    exact = not draws(graph)

    def of(*parts: Batch) -> list[list[float]]:
        with unchanged(model, graph):
            return [[float(each) for each in compute(part, total)] for part in parts]

    once, twice = of(half, _doubled(half))
    codes = [_code(a, b, EXACT if exact else TOLERANCE) for a, b in zip(once, twice, strict=True)]
    kinds = [_CODES[code] for code in _agreed(codes, replicas)]
    for number, kind, before, after in zip(formed, kinds, once, twice, strict=True):
        if kind is None and number.role == "added":
            raise _refusal(number.name, before, after)
    known = list(zip(formed, kinds, strict=True))

    def kinds_in(role: str) -> tuple[Kind, ...]:
        return tuple(kind or "mean" for number, kind in known if number.role == role)

    sums = frozenset(number.name for number, kind in known if number.role == "figures" and kind == "sum")
    targets = [index for index, number in enumerate(formed) if number.role == "targets"]
    applied = [index for index, number in enumerate(formed) if number.role == "applied"]
    neither = exact and any(kinds[index] is None for index in targets)
    changed = exact and any(kinds[index] is None for index in applied)
    if exact and targets and not neither and not _mixes_by_design(model, formed) and (halves := halves_of(batch)):
        first, second, whole = (of(part)[0] for part in halves)
        apart = {
            i for i in (*targets, *applied) if not _adds_up(first[i], second[i], whole[i], mean=kinds[i] == "mean")
        }
        neither, changed = not apart.isdisjoint(targets), changed or not apart.isdisjoint(applied)
    found = Kinds(added=kinds_in("added"), targets=kinds_in("targets"), means=kinds_in("means"), figures=sums)
    hidden = sums and any(number.role == "targets" and number.name == _HIDDEN for number in formed)
    warnings = [_of_pairs(f"of {type(model).__name__}")] if neither else [_of_gradients(model)] * changed
    derived = [number.name for number in formed if number.role == "derived"]
    warnings += [_of_derived(model, derived)] * bool(derived)
    return found, warnings + [_of_hidden_sum(model, sums)] * bool(hidden)


def inspect_losses(model: Any, batch: Batch) -> tuple[bool, list[str]]:
    """Return `Kinds.batch_means`, and warnings of compiled losses in which a sample's value depends on other samples.

    Keras' own losses along other axes than the first do not. Others are computed for the outputs of a batch, as in
    evaluation, and of its halves.

    Raises:
        ConfigError: a loss is one number for the batch, and not the mean of those of its halves.
    """
    unknown = [loss for loss in losses_by_output(model) if not _takes_samples_alone(loss)]
    halves = halves_of(batch)
    if not unknown or halves is None:
        return False, []
    names = ", ".join(sorted({getattr(loss, "name", type(loss).__name__) for loss in unknown}))
    are_numbers: list[bool] = []
    outputs = model(halves[2].inputs, training=False)
    original = active(module_of_losses(), "reduce_weighted_values")

    def sums(targets: Any, outputs: Any) -> list[tf.Tensor]:
        found = []
        are_numbers.clear()

        def noted(values: Any, *arguments: Any, **options: Any) -> Any:
            found.append(tf.reduce_sum(tf.cast(values, tf.float64)))
            are_numbers.append(tf.convert_to_tensor(values).shape.rank == 0)
            return original(values, *arguments, **options)

        with replaced(module_of_losses(), "reduce_weighted_values", noted):
            compiled_losses(model)(targets, outputs)
        return found

    compute = tf.function(sums, autograph=False, reduce_retracing=True)
    graph = compute.get_concrete_function(halves[2].targets, outputs).graph
    if exchanges(graph):
        return False, []
    rows = int(rows_of(samples_in(halves[0])))
    cuts = (slice(0, rows), slice(rows, None), slice(None))

    def values_of(*targets: Any) -> list[tuple[float, ...]]:
        """Return each loss's values of both halves and of the whole, with these targets."""
        results = [
            compute(part, tf.nest.map_structure(lambda each, cut=cut: each[cut], outputs))
            for part, cut in zip(targets, cuts, strict=True)
        ]
        return [tuple(float(each) for each in of_loss) for of_loss in zip(*results, strict=True)]

    def probed(*targets: Any) -> list[tuple[float, ...]]:
        try:
            return values_of(*targets)
        except tf.errors.InvalidArgumentError:  # such targets are none of this loss
            return []

    with unchanged(model, graph):
        known = values_of(*(part.targets for part in halves))
        # A mean over the targets that are not padding is one over samples where none is.
        padded = [probed(*_padded(halves, number)) for number in (0, -1)] if any(are_numbers) else []
        padded = [values for values in padded if values]
    for values in (known, *padded):
        of_batch = [each for each, is_number in zip(values, are_numbers, strict=True) if is_number]
        if np.isfinite(of_batch).all() and not all(
            _adds_up(*each, mean=True, tolerance=_ROUNDING) for each in of_batch
        ):
            raise refusal_of_number(names)
    of_samples = [each for each, is_number in zip(known, are_numbers, strict=True) if not is_number]
    added_up = all(_adds_up(*each, mean=False) for each in of_samples)
    return any(are_numbers), [] if added_up else [_of_pairs(f"of {names}")]


def inspect_forward(model: Any, batch: Batch, logs: StepLogs) -> list[str]:
    """Return warnings of outputs, and losses that layers add, that are others for a batch than for its halves.

    In evaluation, where neither dropout nor statistics of a batch keep halves from adding up, and in training where
    nothing else does.
    """
    halves = halves_of(batch._replace(has_samples=1.0))
    if halves is None:
        return []
    together: dict[str, None] = {}
    for training in (False, True):
        compute, names = _forward(model, logs, training=training)
        graph = compute.get_concrete_function(halves[2]).graph
        if exchanges(graph):
            return []
        if draws(graph) or (training and _mixes_by_design(model, [])):
            continue
        with unchanged(model, graph):
            values = zip(*([float(each) for each in compute(part)] for part in halves), strict=True)
            for name, parts in zip(names, values, strict=True):
                if not any(_adds_up(*parts, mean=mean, tolerance=_tolerance(model)) for mean in (True, False)):
                    together[name] = None
    return [_of_pairs(f"that {name} adds") if name else _of_outputs(model) for name in together]


def _forward(model: Any, logs: StepLogs, *, training: bool) -> tuple[Any, list[str]]:
    """Return what computes the squares of a batch's outputs and the losses that layers add, and their names.

    The outputs have an empty name. The names are known once it is compiled.
    """
    own = {_described(layer) for layer in flatten_layers(model) if _adds_losses(layer)}
    names: list[str] = []

    def numbers(batch: Batch) -> list[tf.Tensor]:
        squares: list[tf.Tensor] = []

        def step(batch: Batch, noted: Any) -> None:
            outputs = tf.nest.flatten(model(batch.inputs, training=training), expand_composites=True)
            floating = [each for each in outputs if tf.is_tensor(each) and each.dtype.is_floating]
            squares.append(
                sum(
                    (tf.reduce_sum(tf.square(tf.cast(each, tf.float64))) for each in floating), tf.zeros([], tf.float64)
                )
            )

        found = _formed(model, batch, total=number_of_samples(batch), step=step, logs=logs)
        added = [each for each in found if each.role == "added" and each.name in own]
        names[:] = ["", *(each.name for each in added)]
        return [*squares, *(tf.cast(each.value, tf.float64) for each in added)]

    return tf.function(numbers, autograph=False, reduce_retracing=True), names


def _tolerance(model: Any) -> float:
    """Return the deviation of numbers that a model computes, by the bits of its layers."""
    short = any(layer.compute_dtype in ("float16", "bfloat16") for layer in flatten_layers(model))
    return EXACT if short else _ROUNDING


def _padded(halves: Sequence[Batch], number: int) -> tuple[Any, Any, Any]:
    """Return the targets of the halves and of both, with `number` for every other one of the second half."""

    def padded(targets: tf.Tensor) -> tf.Tensor:
        odd = tf.reshape(tf.range(tf.size(targets)) % 2 == 1, tf.shape(targets))
        return tf.where(odd, tf.cast(number, targets.dtype), targets)

    first, second = halves[0].targets, tf.nest.map_structure(padded, halves[1].targets)
    return first, second, tf.nest.map_structure(lambda *parts: tf.concat(parts, 0), first, second)


def _takes_samples_alone(loss: Any) -> bool:
    """Return whether a loss of Keras' own gives each sample a value that no other sample has part in."""
    function, arguments = function_of_loss(loss)
    if not getattr(function, "__module__", "").startswith("keras.") or function is keras.losses.circle:
        return False
    axes = np.atleast_1d(arguments.get("axis", -1))
    return all(axis is not None and axis != 0 for axis in axes)


def halves_of(batch: Batch) -> tuple[Batch, Batch, Batch] | None:
    """Return the first and the second half of a batch, and both; None if there are not two samples."""
    first = part_of(batch, lambda count: (0, count // 2))
    second = part_of(batch, lambda count: (count // 2, count // 2 * 2))
    whole = part_of(batch, lambda count: (0, count // 2 * 2))
    if first is None or second is None or whole is None or not int(rows_of(samples_in(whole))):
        return None
    return first, second, whole


def _adds_up(first: float, second: float, whole: float, *, mean: bool, tolerance: float = EXACT) -> bool:
    expected = (first + second) / 2 if mean else first + second
    return abs(whole - expected) <= tolerance * max(abs(first), abs(second), abs(whole))


def _mixes_by_design(model: Any, formed: Sequence[_Number]) -> bool:
    """Return whether statistics of a batch, or divisors that are corrected, keep halves from adding up."""
    normalized = any(isinstance(layer, keras.layers.BatchNormalization) for layer in flatten_layers(model))
    return normalized or any(number.name == _DIVIDED for number in formed)


def may_form_sums(model: Any) -> bool:
    """Return whether code that is not Keras' forms numbers of the samples: a step, a loss, a layer that adds one."""
    return reads_outputs(model) or any(_adds_losses(layer) for layer in flatten_layers(model))


def _formed(model: Any, batch: Batch, *, total: tf.Tensor, step: Callable[..., Any], logs: StepLogs) -> list[_Number]:
    """Return the numbers that `step` forms of a batch, of `total` samples in all."""
    found: list[_Number] = []
    graph = tf.compat.v1.get_default_graph()

    def note(role: str, name: str, value: Any) -> None:
        # A number of a function, loop or branch in the step cannot be looked at from here, and is taken for a mean.
        if tf.compat.v1.get_default_graph() is graph:
            found.append(_Number(role, name, tf.add_n([tf.reduce_sum(each) for each in tf.nest.flatten(value)])))
        else:
            found.append(_Number(role, _HIDDEN, 0.0))

    def add_loss(layer: Any, loss: Any) -> None:
        for term in tf.nest.flatten(loss):
            note("added", _described(layer), term)

    def differentiated(own: Gradients, target: Any, sources: Any, upstream: Any) -> Any:
        note("targets", "loss", target)
        return own(target, sources, upstream)

    def counted(value: tf.Tensor, weight: Any) -> tuple[tf.Tensor, Any]:
        note("means", "metric", value)
        return value, weight

    terms = LossTerms(
        model=model,
        collectives=NoOpCollectives(),
        samples=number_of_samples(batch),
        total=total,
        whole=False,
        divisors="exchanged",
        kinds=Kinds(batch_means=True),
    )
    with ExitStack() as stack:
        stack.enter_context(terms.corrected())
        original = active(module_of_losses(), "reduce_weighted_values")

        def reduced(
            values: Any,
            sample_weight: Any = None,
            mask: Any = None,
            reduction: Any = "sum_over_batch_size",
            dtype: Any = None,
        ) -> Any:
            if divisor_of(sample_weight, mask, reduction, tf.float64) is not None:
                found.append(_Number("divisor", _DIVIDED, 0.0))
            return original(values, sample_weight, mask, reduction, dtype)

        stack.enter_context(replaced(module_of_losses(), "reduce_weighted_values", reduced))
        stack.enter_context(replaced(keras.layers.Layer, "add_loss", add_loss))
        stack.enter_context(differentiating(trained_ids(model), differentiated))
        for metric in means_of(model):
            stack.enter_context(replaced(metric, "update_state", averaging(metric, counted)))
        stack.enter_context(logs.recording())
        returned = step(batch, noted=lambda name, gradients: note("applied", name, _projections(gradients)))
        if isinstance(returned, dict):
            figures = logs.own_numbers(returned)
            found.extend(_Number("figures", name, value) for name, value in figures.items())
            found.extend(
                _Number("derived", name, 0.0) for name, value in figures.items() if _reads_metrics(value, model)
            )
    return found


def _reads_metrics(value: tf.Tensor, model: Any) -> bool:
    """Return whether a tensor of the graph that is being traced is computed from states of metrics."""
    states = {id(unwrap(variable).handle) for metric in metrics_of(model) for variable in metric.variables}
    held = {id(inner) for outer, inner in value.graph.captures if id(outer) in states}
    waiting: list[Any] = [value.op]
    seen: set[int] = set()
    while waiting:
        op = waiting.pop()
        if any(id(tensor) in held for tensor in op.inputs):
            return True
        new = {id(tensor.op): tensor.op for tensor in op.inputs if id(tensor.op) not in seen}
        seen |= new.keys()
        waiting += new.values()
    return False


def _projections(gradients: Sequence[Any]) -> list[tf.Tensor]:
    """Return a number for each gradient that is linear in it: its product with uneven factors."""
    found = [
        tf.reshape(tf.cast(tf.convert_to_tensor(each), tf.float64), [-1]) for each in gradients if each is not None
    ]
    # Not random numbers, by which a step that draws some is known.
    return [tf.reduce_sum(each * tf.cos(17.3 * tf.cast(tf.range(tf.size(each)), tf.float64) ** 2)) for each in found]


def _described(layer: Any) -> str:
    return f"{type(layer).__name__} {layer.name!r}"


def _doubled(batch: Batch) -> Batch:
    samples = (batch.inputs, batch.targets, batch.sample_weight)
    inputs, targets, weights = tf.nest.map_structure(lambda each: None if each is None else _twice(each), samples)
    return batch._replace(inputs=inputs, targets=targets, sample_weight=weights)


def _twice(value: Any) -> Any:
    return tf.sparse.concat(0, [value] * 2) if isinstance(value, tf.SparseTensor) else tf.concat([value] * 2, 0)


def _code(once: float, twice: float, tolerance: float) -> int:
    ratio = twice / once if once else 1.0
    found = "mean" if abs(ratio - 1.0) < tolerance else "sum" if abs(ratio - 2.0) < 2 * tolerance else None
    return _CODES.index(found)


def _agreed(codes: Sequence[int], replicas: Backend) -> list[int]:
    """Return the largest code that any replica found, for each number."""
    if replicas.size == 1:
        return list(codes)
    agreed = tf.Variable(codes, dtype=tf.int32)
    run_once(
        lambda: replicas.run(lambda: agreed.assign(replicas.all_reduce(agreed.read_value(), name="kinds", op="max")))
    )
    return [int(code) for code in agreed.numpy()]


def _adds_losses(layer: Any) -> bool:
    """Return whether code that is not Keras' may add losses in a layer's call: its own, or an activity regularizer."""
    regularizer = getattr(layer, "activity_regularizer", None)
    return _is_foreign(layer) or (regularizer is not None and _is_foreign(regularizer))


def _is_foreign(thing: Any) -> bool:
    module = getattr(thing, "__module__", type(thing).__module__)  # of a function, its own
    return module.split(".")[0] not in ("keras", "hvdtrain")


@contextmanager
def unchanged(model: Any, graph: Any) -> Iterator[None]:
    """Restore after the context what a call has changed: statistics, generators, metrics, variables of a step's own.

    `graph` is that of the call, which has all variables.
    """
    weights = {id(unwrap(variable)) for variable in model.trainable_variables}
    held = [*model.non_trainable_variables, *(v for metric in metrics_of(model) for v in metric.variables)]
    changing = {id(unwrap(v)): unwrap(v) for v in [*held, *graph.variables] if id(unwrap(v)) not in weights}.values()
    before = [np.asarray(variable) for variable in changing]
    yield
    for variable, value in zip(changing, before, strict=True):
        variable.assign(value)


def _refusal(layer: str, once: float, twice: float) -> ConfigError:
    cure = "Add a mean, such as keras.ops.mean(keras.ops.square(x))."
    if 0.49 < twice / (once or 1.0) < 0.51:
        cure = "Keras divides what an activity regularizer returns by the samples: return a sum of values of samples."
    return ConfigError(
        f"{layer} adds a loss that is neither a mean nor a sum over the samples, "
        f"of which each rank has some. Received: {once:g} for a batch, {twice:g} for twice its samples. {cure}"
    )


def _of_pairs(whose: str) -> str:
    return (
        f"warning: the loss {whose} is neither a mean nor a sum over the samples: halves of a batch do not give that "
        "of the batch, as where samples are compared with one another, or divided by a sum over them. Each rank "
        "computes it for its own samples alone. To compare all of them, gather what is compared: "
        "hvdtrain.all_gather(embeddings)."
    )


def _of_outputs(model: Any) -> str:
    return (
        f"warning: the outputs of {type(model).__name__} {model.name!r} for some samples are others beside other "
        "samples, as where a layer takes statistics of a batch: halves of a batch do not give those of the batch. Each "
        "rank computes them for its own samples alone. To take them of all, gather them in the layer's call: "
        "hvdtrain.all_gather(x)."
    )


def _of_gradients(model: Any) -> str:
    return (
        f"warning: train_step of {type(model).__name__} applies gradients of which those of a batch are none of those "
        "of its halves, as where they are clipped or normalized before optimizer.apply: each rank does so with its "
        "own, and the mean of them is applied. To clip what all ranks have together, give the optimizer "
        "global_clipnorm, clipnorm or clipvalue."
    )


def _of_derived(model: Any, names: Sequence[str]) -> str:
    return (
        f"warning: train_step of {type(model).__name__} computes {', '.join(names)} from results of metrics, which are "
        "those of a rank's own samples there, and are counted over all ranks afterwards. Compute it in the result() of "
        "a metric."
    )


def _of_hidden_sum(model: Any, sums: Iterable[str]) -> str:
    return (
        f"warning: train_step of {type(model).__name__} returns a sum over the samples ({', '.join(sorted(sums))}) and "
        "differentiates within a tf.function, where it cannot be seen whether the loss is a sum, too: its gradient "
        "would be that of a rank's samples alone. Leave out @tf.function there, or use a mean."
    )


def draws(graph: Any) -> bool:
    """Return whether random numbers are drawn."""
    return any("Random" in operation for operation in _operations(graph))


def exchanges(graph: Any) -> bool:
    """Return whether something is exchanged with other ranks."""
    return any(operation.startswith("Horovod") for operation in _operations(graph))


def _operations(graph: Any) -> Iterable[str]:
    definition = graph.as_graph_def()
    return {
        node.op for nodes in (definition.node, *(f.node_def for f in definition.library.function)) for node in nodes
    }
