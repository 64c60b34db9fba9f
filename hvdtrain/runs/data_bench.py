"""How fast the data come, against how fast the step takes them."""

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
from hvdtrain.runtime.session import Session
from hvdtrain.runs.run import run_trainer
from hvdtrain.runs.run_data import run_data, input_advice

WARM_UP = 5
READ_AHEAD = 32
"""Batches that may have been read while the step ran alone: they are taken before the pipeline is measured."""
ROUNDS = 3
NEARLY = 0.9
"""Share of the step's own speed at which training does not wait: rounds differ by up to a tenth."""


@dataclass(frozen=True)
class DataBench:
    """Samples per second over all ranks, medians of rounds that took turns."""

    pipeline: float
    """What the pipeline gives when nothing else runs."""
    step: float
    """What the step takes when it is given one batch again and again."""
    together: float
    """What training reaches."""
    cure: str = ""
    """What would make the samples come faster, in a sentence; "" where nothing is left to be done."""

    @property
    def headroom(self) -> float:
        """How many times as fast as the step the pipeline is."""
        return self.pipeline / self.step

    @property
    def reached(self) -> float:
        """Share of the step's own speed that training reaches."""
        return self.together / self.step


def bench_data(session: Session, config: Config, *, steps: int) -> DataBench:
    """Measure the pipeline alone, the step alone, and both together, `steps` steps at a time; every rank calls it."""
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
    """Say in a few words whether training waits for its data, which is what it reaches against the step alone."""
    share = f"{result.reached:.0%} of the step's speed"
    facts = f"The pipeline is {result.headroom:.1f} times as fast as the step, and training reaches {share}:"
    if result.reached >= NEARLY:
        return f"{facts} it does not wait for its data."
    why = "it waits for its data."
    if result.headroom >= 1:
        why = "the data come fast enough, but reading them takes cores that the step would use."
    return f"{facts} {why} {result.cure}".rstrip()
