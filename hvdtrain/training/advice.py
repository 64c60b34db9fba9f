"""Warnings at the start of a run: valid settings that are slow or have no effect."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras import flatten_layers
from hvdtrain.config.errors import opt
from hvdtrain.config.options import notes as notes_on
from hvdtrain.config.training import CompressionName
from hvdtrain.gradients.reduction import GradientReducer, ReductionOptions
from hvdtrain.observability.events import Observer, RunInfo
from hvdtrain.observability.wording import plural
from hvdtrain.optim.averaging import innermost
from hvdtrain.parallel.pipeline.schedule import ideal_bubble
from hvdtrain.parallel.pipeline.stage import PipelineStage
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.assembly import job_facts
from hvdtrain.training.options import StepOptions

MOST_ELEMENTS = 4 * 1024 * 1024
"""Gradients larger than this are judged by a part of this size: beyond it both times grow with the size alone."""
REPETITIONS = 5
MOST_VIEWS = 4


def compression_cost(backend: Backend, elements: int, compression: CompressionName) -> float:
    """Return the time of a compressed exchange as a multiple of that of a plain one: above 1 it slows training.

    Both are measured in turn, and the medians of a few repetitions compared. All ranks must call it with the same
    arguments; each gets the ratio that it saw.

    Args:
        backend: the replicas; with one of them nothing travels, and the ratio is 1.
        elements: float32 elements of all gradients together; at most `MOST_ELEMENTS` are sent.
        compression: what is compared with `none`.
    """
    if backend.size == 1 or compression == "none" or elements < 1:
        return 1.0
    values = tf.Variable(tf.random.stateless_normal([min(elements, MOST_ELEMENTS)], [1, backend.index]))
    kinds: tuple[CompressionName, CompressionName] = ("none", compression)
    exchanges = [_exchange(backend, values, kind) for kind in kinds]
    for exchange in exchanges:
        _seconds(exchange)  # the first call compiles
    rounds = [[_seconds(exchange) for exchange in exchanges] for _ in range(REPETITIONS)]
    plain, compressed = (median(times) for times in zip(*rounds, strict=True))
    return compressed / plain


def _exchange(backend: Backend, values: tf.Variable, compression: CompressionName) -> Callable[[], tf.Tensor]:
    reducer = GradientReducer(backend, ReductionOptions("sum", compression))

    def exchange() -> tf.Tensor:
        (total,) = reducer.reduce([values.read_value()], ["values"], role=f"compression_probe/{compression}")
        return total

    return tf.function(exchange, autograph=False)


def _seconds(exchange: Callable[[], tf.Tensor]) -> float:
    """Time one call, up to where its result can be read."""
    begin = time.perf_counter()
    exchange()[:1].numpy()
    return time.perf_counter() - begin


def compression_warning(compression: CompressionName, cost: float) -> str | None:
    """Return the line that says that compression does not pay here; None where it does.

    Args:
        compression: the option's value.
        cost: what `compression_cost` returned.
    """
    if cost <= 1.0:
        return None
    return (
        f"warning: {opt('compression', compression)} makes the exchange {cost:.1f}x as slow as none between these "
        f"ranks; it pays where the network is slower than the cores: use {opt('compression', 'none')}."
    )


TINY_BATCH = 8
"""Samples per rank and step below which overhead and communication dominate."""

FEW_TINY_STEPS = 1000
"""Steps of so few samples take seconds, of which nothing is to be gained."""

MOST_IDLE = 0.25
"""Pipeline bubble, as a fraction of the time, above which a warning is given."""


class Announcer:
    """Announces the run and warns about slow settings before the first step."""

    def __init__(self, backend: Backend, options: StepOptions, notes: Sequence[str]) -> None:
        self._backend = backend
        self._options = options
        self._notes = notes
        self._compression_cost: float | None = None
        self._advised: set[str] = set()
        """What was advised before an earlier `fit`, and is not said again."""

    def announce(
        self,
        info: RunInfo,
        state: TrainState,
        observers: Observer,
        notes: Sequence[str] = (),
        *,
        narrow_outputs: bool,
    ) -> None:
        """Announce a run, with `notes` on its data. Collective: compression is timed once."""
        if self._compression_cost is None:
            self._compression_cost = compression_cost(self._backend, state.parameters(), self._options.compression)
        observers.on_start(info)
        advised = advice(info, self._options, compression_cost=self._compression_cost, narrow_outputs=narrow_outputs)
        lines = [line for line in advised if line not in self._advised]
        self._advised.update(advised)
        lines += notes_on(self._options, facts=job_facts(self._backend))
        lines += repeated_rows(state.model, state.optimizer)
        session = self._backend.session
        if not session.plan.pinned:
            lines += crowded(session.environment.local_size, len(session.plan.cores))
        if isinstance(state.model, PipelineStage):
            lines += pipeline_notes(state.model, self._options)
        for line in [*self._notes, *notes, *self._backend.remarks, *lines]:
            observers.on_message(info.wording(line))


def advice(info: RunInfo, options: StepOptions, *, compression_cost: float, narrow_outputs: bool) -> list[str]:
    """Return the warnings; `narrow_outputs` says whether the model has 16-bit outputs."""
    lines = [_tiny(info), compression_warning(options.compression, compression_cost)]
    lines.append(_precision(options.precision))
    if narrow_outputs:
        lines.append(
            'warning: the model\'s outputs have 16 bits: give its last layer dtype="float32", so that they are not '
            "rounded before the loss, which is computed in 32."
        )
    return [line for line in lines if line is not None]


def crowded(ranks: int, cores: int) -> list[str]:
    """Return the line on a machine that runs more ranks than this rank may use cores."""
    if ranks <= cores or tf.config.list_logical_devices("GPU"):
        return []
    return [
        f"note: {plural(ranks, 'rank')} take turns on {plural(cores, 'core')} of this machine: use at most as many "
        "ranks as cores, except to try things out."
    ]


def repeated_rows(model: Any, optimizer: Any) -> list[str]:
    """Return the line on tables whose weights depend on how often a batch names a row, in Keras but not here.

    Keras squares each occurrence of a row by itself for the second moment, and clips it by itself. Here, as in Keras 2,
    the gradient of a row is the sum over its occurrences, on every rank.
    """
    inner = innermost(optimizer)
    clips = any((inner.clipnorm, inner.clipvalue, inner.global_clipnorm))
    if isinstance(inner, keras.optimizers.SGD | keras.optimizers.Lion) and not clips:
        return []
    tables = [layer for layer in flatten_layers(model) if isinstance(layer, keras.layers.Embedding)]
    names = [table.name for table in tables if table.trainable_weights and not getattr(table, "tie_weights", False)]
    if not names:
        return []
    return [
        f"note: the gradients of a row that a batch names several times ({', '.join(dict.fromkeys(names))}) are added "
        f"before {type(inner).__name__} {'clips' if clips else 'squares'} them; Keras does so with each, and moves "
        "such rows further: docs/keras_support.md."
    ]


def _tiny(info: RunInfo) -> str | None:
    if info.microbatch >= TINY_BATCH or info.total_steps - info.start_step < FEW_TINY_STEPS:
        return None
    remedy = (
        f"a smaller {opt('accumulate')}, a larger {opt('batch')}" if info.accumulate > 1 else f"a larger {opt('batch')}"
    )
    return (
        f"warning: {plural(info.microbatch, 'sample')} at a time on each rank are too few to keep it busy: "
        f"overhead and exchange take most of the time. What helps: {remedy}, or fewer ranks."
    )


def _precision(precision: str | None) -> str | None:
    has_gpu = bool(tf.config.list_logical_devices("GPU"))
    if precision == "mixed_float16" and not has_gpu:
        return (
            "warning: CPUs compute fp16 by converting each number: a small CNN took 300 times as long. "
            f"Use {opt('precision', 'mixed_bfloat16')}."
        )
    if precision == "float32" and has_gpu:
        fast = opt("precision", "mixed_float16")
        return f"note: GPUs with tensor cores multiply 16-bit numbers several times as fast: {fast}."
    return None


def pipeline_notes(model: PipelineStage, options: StepOptions) -> list[str]:
    """Describe a pipeline's stages and bubble."""
    cut, chunks = model.whole.cut, options.virtual_stages
    costs = [cut.cost(stage) for stage in range(cut.stages)]
    shares = ", ".join(
        f"{name} ({100 * cost / sum(costs):.0f} %)" for name, cost in zip(cut.first_names(), costs, strict=True)
    )
    idle = ideal_bubble(model.ranks, options.accumulate, chunks)
    lines = [
        f"note: {cut.stages} stages begin with {shares} of the work; ranks are idle for at least {100 * idle:.0f} %."
    ]
    if idle > MOST_IDLE:
        lines.append(
            f"warning: with {opt('accumulate', options.accumulate)} a pipeline of {model.ranks} ranks is busy for "
            f"{100 - 100 * idle:.0f} % of the time: use {opt('accumulate', 4 * model.ranks)} or more."
        )
    return lines


def narrow(outputs: Any) -> bool:
    """Return whether any tensor has a 16-bit floating dtype."""
    return any(tf.as_dtype(t.dtype).is_floating and tf.as_dtype(t.dtype).size < 4 for t in tf.nest.flatten(outputs))


def about_views(inputs: Any, replicas: int) -> str:
    """Return what to write for views that were stacked along dim 0, or nothing if samples seem to be there.

    They seem not to be if a batch of all replicas has at most `MOST_VIEWS` rows, each of which has more of its own.
    """
    shapes = [tuple(leaf.shape) for leaf in tf.nest.flatten(inputs) if leaf is not None]
    if replicas == 1 or not shapes or not all(_may_be_views(shape, replicas) for shape in shapes):
        return ""
    rows, *rest = shapes[0]
    return (
        f"Dim 0 of the data counts samples: of {rows * replicas}, this replica has {rows}, of shape {tuple(rest)}. "
        "If it counts views of the samples in dim 1, give the views as a tuple, ((first, second),) in place of "
        "tf.stack([first, second])."
    )


def _may_be_views(shape: Sequence[int | None], replicas: int) -> bool:
    rows, inner = shape[:2] if len(shape) > 2 else (None, None)
    return bool(rows and inner and rows * replicas <= MOST_VIEWS < inner)
