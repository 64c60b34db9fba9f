"""Measures the data pipeline against the training step."""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.select import backend_for
from hvdtrain.config.run import Config
from hvdtrain.runs.run_data import input_advice, run_data
from hvdtrain.runs.trainers import run_trainer
from hvdtrain.runtime.session import Session

WARM_UP = 5
READ_AHEAD = 32
"""Batches that may have been prefetched while the step ran alone; drained before the pipeline is measured."""
ROUNDS = 3
NEARLY = 0.9
"""Fraction of the step's own speed from which training does not wait for data: rounds differ by up to a tenth."""


@dataclass(frozen=True)
class DataBench:
    """Samples per second over all ranks: medians of rounds that took turns."""

    pipeline: float
    """Rate of the pipeline alone."""
    step: float
    """Rate of the step alone, on one fixed batch."""
    together: float
    """Rate of training."""
    cure: str = ""
    """Advice for a faster pipeline: a sentence, or ""."""

    @property
    def headroom(self) -> float:
        """Rate of the pipeline relative to the step."""
        return self.pipeline / self.step

    @property
    def reached(self) -> float:
        """Rate of training relative to the step."""
        return self.together / self.step


def bench_data(session: Session, config: Config, *, steps: int) -> DataBench:
    """Measure the pipeline, the step, and training, in turns of `steps` steps; every rank calls it."""
    backend = backend_for(session)
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build(source.training)
    trainer.broadcast_state()
    step = trainer.compiled_step(source.training)
    stream = source.training.batches(0)
    one = next(stream)
    sides: dict[str, Callable[[], None]] = {
        "pipeline": lambda: _drain(itertools.islice(stream, steps)),
        "step": lambda: _drain(step(one, measure=n == steps - 1).totals for n in range(steps)),
        "together": lambda: _drain(step(batch, measure=False).totals for batch in itertools.islice(stream, steps)),
    }
    for _ in range(WARM_UP):
        step(next(stream), measure=False)
    step(one, measure=True)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(ROUNDS):
        for name, side in sides.items():
            if name != "step":
                _drain(itertools.islice(stream, READ_AHEAD))
            backend.gather_bytes(b"", timeout=600.0)
            begin = time.perf_counter()
            side()
            seconds[name].append(time.perf_counter() - begin)
    samples = steps * config.data.batch
    rates = {name: samples / float(np.median(times)) for name, times in seconds.items()}
    return DataBench(**rates, cure=input_advice(config.data, heavy=source.splits.train.heavy))


def _drain(items: Iterable[Any]) -> None:
    (last,) = deque(items, maxlen=1)
    if isinstance(last, tf.Tensor):
        last.numpy()  # steps are dispatched ahead: the last one's result ends the measurement


def verdict(result: DataBench) -> str:
    """Return in words whether training waits for data, by its rate relative to the step alone."""
    share = f"{result.reached:.0%} of the step's speed"
    facts = f"The pipeline is {result.headroom:.1f} times as fast as the step, and training reaches {share}:"
    if result.reached >= NEARLY:
        return f"{facts} it does not wait for its data."
    why = "it waits for its data."
    if result.headroom >= 1:
        why = "the data come fast enough, but reading them takes cores that the step would use."
    return f"{facts} {why} {result.cure}".rstrip()
