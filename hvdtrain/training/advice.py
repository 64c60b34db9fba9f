"""Advice at the start of a run: settings that are valid, but slow or without effect."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.gradients.compression_probe import compression_cost, compression_warning
from hvdtrain.observability.events import Observer, RunInfo
from hvdtrain.observability.wording import plural
from hvdtrain.state.train_state import TrainState
from hvdtrain.training.options import EXCHANGE_OPTIONS, StepOptions

TINY_BATCH = 8
"""Samples per rank and step below which overhead and exchange outweigh the work."""


class Announcer:
    """Tells the observers what a run is, and what is slow about it, before its first step.

    Args:
        backend: the replicas.
        options: of the step.
        notes: what is to be said besides.
    """

    def __init__(self, backend: Backend, options: StepOptions, notes: Sequence[str]) -> None:
        self._backend = backend
        self._options = options
        self._notes = notes
        self._compression_cost: float | None = None

    def announce(
        self,
        info: RunInfo,
        state: TrainState,
        observers: Observer,
        notes: Sequence[str] = (),
        *,
        narrow_outputs: bool,
    ) -> None:
        """Announce a run, with `notes` of its data; every rank calls it, as what compression costs is tried once."""
        if self._compression_cost is None:
            self._compression_cost = compression_cost(self._backend, state.parameters(), self._options.compression)
        observers.on_start(info)
        lines = advice(info, self._options, compression_cost=self._compression_cost, narrow_outputs=narrow_outputs)
        for line in [*self._notes, *notes, *lines]:
            observers.on_message(info.wording(line))


def advice(info: RunInfo, options: StepOptions, *, compression_cost: float, narrow_outputs: bool) -> list[str]:
    """Return the lines of advice.

    Args:
        info: the run.
        options: options of its step.
        compression_cost: measured by `compression_cost`.
        narrow_outputs: whether the model has 16-bit outputs.
    """
    lines = [_tiny(info), compression_warning(options.compression, compression_cost), _idle(info, options)]
    if options.precision == "mixed_float16" and not tf.config.list_logical_devices("GPU"):
        lines.append(
            "warning: CPUs compute fp16 by converting each number: a small CNN took 300 times as long. "
            "Use --precision=mixed_bfloat16."
        )
    if narrow_outputs:
        lines.append(
            'warning: the model\'s outputs have 16 bits: give its last layer dtype="float32", so that they are not '
            "rounded before the loss, which is computed in 32."
        )
    return [line for line in lines if line is not None]


def _tiny(info: RunInfo) -> str | None:
    if info.microbatch >= TINY_BATCH:
        return None
    remedy = "a smaller --accumulate, a larger --batch" if info.accumulate > 1 else "a larger --batch"
    return (
        f"warning: {plural(info.microbatch, 'sample')} at a time on each rank are too few to keep it busy: "
        f"overhead and exchange take most of the time. What helps: {remedy}, or fewer ranks."
    )


def _idle(info: RunInfo, options: StepOptions) -> str | None:
    idle = [f"--{name.replace('_', '-')}" for name in EXCHANGE_OPTIONS if name in options.chosen()]
    if info.world_size > 1 or not idle:
        return None
    return f"note: one process exchanges nothing: {', '.join(idle)} have no effect."


def narrow(outputs: Any) -> bool:
    """Whether any of these tensors has a 16-bit floating dtype."""
    return any(t.dtype.is_floating and t.dtype.size < 4 for t in tf.nest.flatten(outputs))
