"""A side that hvdtrain trains, on any backend: the loop that users run with a stopwatch, and the parts of its step.

Variants of the step, each with one part less, take turns in the same processes:

    whole    a batch from the pipeline, forward and backward pass, exchange, update
    batch    the same on one fixed batch: without the pipeline
    alone    the same without the exchange, on all ranks at the same time
    passes   the same without the update: forward and backward pass

The parts are the differences: input = whole - batch, exchange = batch - alone, update = alone - passes. A part that
overlaps with another counts only as far as it prolongs the step. Differences of noisy times can be negative, and are
reported as they are.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.backends.select import backend_for
from hvdtrain.backends.single import SingleBackend
from hvdtrain.bench.timing import (
    ServedProcesses,
    Timing,
    Usage,
    in_turn,
    own_usage,
    peak_rss_mib,
    process_settings,
    sent_to_itself,
    usage_figures,
    window,
)
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.events import Observer
from hvdtrain.runs.run_data import run_data
from hvdtrain.runs.trainers import run_trainer
from hvdtrain.runtime.session import Session
from hvdtrain.state.lent_optimizer import without_slots
from hvdtrain.training.plan import Plan
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.step.contract import LocalGradients
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.logs import StepLogs
from hvdtrain.training.step.train_step import TrainStep
from hvdtrain.training.trainer import Trainer
from hvdtrain.training.update_rules.all_reduce import AllReduceUpdate
from hvdtrain.training.update_rules.base import UpdateRule

WITH_BREAKDOWN = ("horovod", "single")
"""Backends whose exchange can be left out: each process holds plain variables."""
ROUNDS = 3
PARTS = {
    "forward and backward": ("passes", None),
    "exchange": ("batch", "alone"),
    "input": ("whole", "batch"),
    "update": ("alone", "passes"),
}
"""Each part's time: that of the first variant minus that of the second."""


class Stopwatch(Observer):
    """Times windows of steps on rank 0.

    Args:
        steps: steps of a window.
        beside: called between windows, untimed.
    """

    def __init__(self, steps: int, beside: Callable[[], None] | None = None) -> None:
        self.windows_ms: list[float] = []
        self._steps = steps
        self._beside = beside
        self._begin = time.perf_counter()

    def on_progress(self, step: int) -> None:
        """End a window and begin the next one."""
        if step % self._steps:
            return
        self.windows_ms.append(1000.0 * (time.perf_counter() - self._begin) / self._steps)
        if self._beside is not None:
            self._beside()
        self._begin = time.perf_counter()


class Metered:
    """Training data that record what this rank and its servers use, and this machine sends, over the counted steps."""

    def __init__(self, data: TrainingData, timing: Timing, served: ServedProcesses) -> None:
        self.steps_per_epoch = data.steps_per_epoch
        self.pass_steps = data.pass_steps
        self.batch = data.batch
        self.remedy = data.remedy
        self._looks: list[tuple[Usage, int]] = []
        self._data = data
        self._timing = timing
        self._served = served

    def batches(self, start_step: int) -> Iterator[Batch]:
        """Yield the batches."""
        for step, batch in enumerate(self._data.batches(start_step), start_step):
            if step in (self._timing.first, self._timing.last):
                self._looks.append((own_usage() + self._served.usage(), sent_to_itself()))
            yield batch

    def used(self) -> tuple[Usage, int]:
        """Return what was used, and the bytes that this machine sent to itself, over the counted steps."""
        (usage, sent), (later, sent_later) = self._looks
        return later.since(usage), sent_later - sent


def built_trainer(config: Config, backend: Backend) -> tuple[Trainer, TrainingData]:
    """Return a trainer as the command line makes it, with its model built, and its data."""
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build(source.training)
    return trainer, source.training


def measure(session: Session, config: Config, timing: Timing) -> tuple[dict[str, Any], dict[str, Any]]:
    """Measure training as users run it; return figures and facts, valid on rank 0. Collective."""
    served = ServedProcesses(session)
    backend = backend_for(session)
    trainer, training = built_trainer(config, backend)
    data, watch = Metered(training, timing, served), Stopwatch(timing.steps)
    # One extra step, at which the CPU time after the last counted one is recorded.
    trainer.train(data, Plan(timing.last + 1, log_every=timing.steps), observers=watch)
    (usage, sent), count = data.used(), timing.last - timing.first
    everyone = gather(backend, [vars(usage), [peak_rss_mib(), *served.peak_rss_mib()]])
    usages, peaks = [Usage(**used) for used, _ in everyone], [peak for _, peaks in everyone for peak in peaks]
    figures = {
        "windows_ms": watch.windows_ms[timing.warm_up : timing.warm_up + timing.windows],
        **usage_figures(usages, peaks, count),
    }
    place = session.environment
    if place.controller == "gloo" and place.size > 1:  # which alone uses the loopback
        figures["sent_mb"] = sent / count / 1e6
    if timing.breakdown and backend.name in WITH_BREAKDOWN:
        figures["breakdown_ms"] = breakdown(session, config, trainer=trainer, data=training, timing=timing)
    settings = process_settings(session.plan.threads, malloc=session.malloc)
    return figures, {"settings": settings, "parameters": trainer.state.parameters()}


def breakdown(
    session: Session, config: Config, *, trainer: Trainer, data: TrainingData, timing: Timing
) -> dict[str, float]:
    """Return the milliseconds of each part of `trainer`'s step. Collective, after all other measurements."""
    backend = trainer.backend
    stream = data.batches(0)
    one = next(stream)
    whole = trainer.compiled_step(data)
    mine = one._replace(global_samples=config.data.batch // backend.data_parallel.size)
    here, optimizer = SingleBackend(session), trainer.optimizer
    with without_slots(optimizer):  # for slots of its own: the trainer's may be slices
        update = AllReduceUpdate(here, trainer.model, optimizer)
        alone = _step_alone(config, trainer, here, mine=mine, rule=update)
        alone()  # is traced with them
    steps: dict[str, Callable[[], Any]] = {
        "whole": lambda: whole(next(stream), measure=False).totals,
        "batch": lambda: whole(one, measure=False).totals,
        "alone": alone,
        "passes": _step_alone(config, trainer, here, mine=mine, rule=NoUpdate()),
    }
    for step in steps.values():
        step().numpy()  # traces
    count = max(2, timing.steps // 2)
    sides = {name: partial(window, step, count) for name, step in steps.items()}
    return parts_of(in_turn(sides, ROUNDS, partial(gather, backend), warm_up=0))


def parts_of(times_ms: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the milliseconds of each part, from those of each variant in each round: differences of medians."""
    medians = {name: float(np.median(times)) for name, times in times_ms.items()}
    return {part: medians[over] - (0.0 if under is None else medians[under]) for part, (over, under) in PARTS.items()}


def _step_alone(config: Config, trainer: Trainer, here: Backend, *, mine: Batch, rule: UpdateRule) -> Callable[[], Any]:
    """Return a step on this rank's slice of a batch, without any exchange."""
    state, accumulate = trainer.state, config.training.accumulate
    samples = config.data.batch // trainer.backend.data_parallel.size
    logs = StepLogs(here, trainer.model, "train_step")
    passes = ForwardBackward(here, state, logs, parameters=rule.parameters(state.trainable), whole=accumulate == 1)
    step = TrainStep(
        backend=here,
        state=state,
        passes=passes,
        logs=logs,
        rule=rule,
        microbatch=per_microbatch(samples, 1, accumulate) if accumulate > 1 else None,
    )
    return lambda: step(mine, measure=False).totals


class NoUpdate(UpdateRule):
    """Leaves everything as it is, once all gradients of one replica are there."""

    trainers = 1

    def __init__(self) -> None:
        """Own nothing: there is no optimizer to build."""

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, None]:
        """Return the totals, no longer those of the step, and no norm."""
        gradients = [g.values if isinstance(g, tf.IndexedSlices) else g for g in local.gradients if g is not None]
        # A value of each goes into the result: control dependencies would be optimized away, and the backward pass.
        touched = [tf.cast(tf.reshape(gradient, [-1])[0], local.totals.dtype) for gradient in gradients]
        return tf.add_n([local.totals, *(tf.fill(tf.shape(local.totals), value) for value in touched)]), None
