"""Breakdown of the step time: variants of the step, each with one part less, take turns in the same processes.

    whole    a batch from the pipeline, forward and backward pass, exchange, update
    batch    the same on one fixed batch: without the pipeline
    alone    the same without the exchange, on all ranks at the same time
    passes   the same without the update: forward and backward pass

The parts are the differences: input = whole - batch, exchange = batch - alone, update = alone - passes. A part that
overlaps with another counts only as far as it prolongs the step. Differences of noisy times can be negative, and are
reported as they are.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.single import SingleBackend
from hvdtrain.bench.timing import Timing
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.models.registry import model_family
from hvdtrain.runtime.session import Session
from hvdtrain.training.objective.losses import summed_loss
from hvdtrain.training.objective.metric_specs import MetricSpec
from hvdtrain.training.step.batches import per_microbatch
from hvdtrain.training.step.forward_backward import LocalGradients
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


class NoUpdate(UpdateRule):
    """Leaves everything as it is, once all gradients are there."""

    def __init__(self) -> None:
        """Own nothing: there is no optimizer to build."""

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, None]:
        """See `UpdateRule`; the totals are no longer those of the step."""
        gradients = [g.values if isinstance(g, tf.IndexedSlices) else g for g in local.gradients if g is not None]
        # A value of each goes into the result: control dependencies would be optimized away, and the backward pass.
        touched = [tf.cast(tf.reshape(gradient, [-1])[0], local.totals.dtype) for gradient in gradients]
        return tf.add_n([local.totals, *(tf.fill(tf.shape(local.totals), value) for value in touched)]), None


class Variants:
    """The variants by name, and their times in milliseconds per round."""

    def __init__(self, backend: Backend, steps: dict[str, Callable[[], Any]]) -> None:
        self._backend = backend
        self._steps = steps
        self.times_ms: dict[str, list[float]] = {name: [] for name in steps}

    def run(self, count: int) -> None:
        """Run `count` steps of each variant in each round."""
        for step in self._steps.values():
            step().numpy()  # traces
        for _ in range(ROUNDS):
            for name, step in self._steps.items():
                self._backend.gather_bytes(b"", timeout=600.0)  # nobody computes while others begin
                self.times_ms[name].append(_milliseconds(step, count))

    @staticmethod
    def parts(by_rank: Sequence[dict[str, list[float]]]) -> dict[str, float]:
        """Return the milliseconds of each part: medians over the rounds, on the slowest rank."""
        names = by_rank[0]
        medians = {name: float(np.median(np.max([times[name] for times in by_rank], axis=0))) for name in names}
        return {
            part: medians[over] - (0.0 if under is None else medians[under]) for part, (over, under) in PARTS.items()
        }


def _milliseconds(step: Callable[[], Any], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count - 1):
        step()
    step().numpy()
    return 1000.0 * (time.perf_counter() - begin) / count


def breakdown(session: Session, config: Config, trainer: Trainer, data: TrainingData, timing: Timing) -> Variants:
    """Measure the variants of `trainer`'s step in turn; collective, after all other measurements."""
    backend = trainer.backend
    stream = data.batches(0)
    one = next(stream)
    whole = trainer.compiled_step(data)
    steps: dict[str, Callable[[], Any]] = {
        "whole": lambda: whole(next(stream), measure=False).totals,
        "batch": lambda: whole(one, measure=False).totals,
    }
    mine = one._replace(global_samples=config.data.batch // backend.data_parallel.size)
    here = SingleBackend(session)
    steps["alone"] = _alone(
        config,
        trainer=trainer,
        here=here,
        mine=mine,
        rule=AllReduceUpdate(here, trainer.model, _fresh(trainer.optimizer)),
    )
    steps["passes"] = _alone(config, trainer=trainer, here=here, mine=mine, rule=NoUpdate())
    variants = Variants(backend, steps)
    variants.run(max(2, timing.steps // 2))
    return variants


def _fresh(optimizer: Any) -> Any:
    """Return an optimizer of the same settings, with slots of its own: the trainer's may be slices."""
    return type(optimizer).from_config(optimizer.get_config())


def _alone(config: Config, trainer: Trainer, here: Backend, mine: Batch, rule: UpdateRule) -> Callable[[], Any]:
    """Return a step on this rank's slice of a batch, without any exchange."""
    model, training = trainer.model, config.training
    outputs = model(mine.inputs, training=False)
    names = lambda: getattr(model, "output_names", None)  # noqa: E731
    samples = config.data.batch // trainer.backend.data_parallel.size
    step = TrainStep(
        backend=here,
        state=trainer.state,
        loss=summed_loss(model_family(config.model).loss(), None, names),
        metrics=MetricSpec([], []).resolve(mine.targets, outputs, here, names),
        rule=rule,
        microbatch=per_microbatch(samples, 1, training.accumulate) if training.accumulate > 1 else None,
    )
    return lambda: step(mine, measure=False).totals
