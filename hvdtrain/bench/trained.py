"""A side that hvdtrain trains, on any backend: the loop that users run, with a stopwatch."""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.backends.select import backend_for
from hvdtrain.bench.breakdown import WITH_BREAKDOWN, breakdown
from hvdtrain.bench.served import ServedProcesses
from hvdtrain.bench.timing import Timing, Usage, merged, own_usage, peak_rss_mib, process_settings
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.observability.events import Observer
from hvdtrain.runs.run_data import run_data
from hvdtrain.runs.trainers import run_trainer
from hvdtrain.runtime.session import Session
from hvdtrain.training.loop.loop import Plan
from hvdtrain.training.trainer import Trainer

GATHER_TIMEOUT_S = 600.0


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
    """Training data that record what this rank and its servers use over the counted steps."""

    def __init__(self, data: TrainingData, timing: Timing, served: ServedProcesses) -> None:
        self.steps_per_epoch = data.steps_per_epoch
        self.batch = data.batch
        self.remedy = data.remedy
        self._used: dict[int, Usage] = {}
        self._data = data
        self._timing = timing
        self._served = served

    def batches(self, start_step: int) -> Iterator[Batch]:
        """See `TrainingData.batches`."""
        for step, batch in enumerate(self._data.batches(start_step), start_step):
            if step in (self._timing.first, self._timing.last):
                self._used[step] = own_usage() + self._served.usage()
            yield batch

    def used(self) -> Usage:
        """Return what was used over the counted steps."""
        return self._used[self._timing.last].since(self._used[self._timing.first])


def measure(session: Session, config: Config, timing: Timing) -> dict[str, Any]:
    """Measure training as users run it; every rank calls it, and the answer is valid on rank 0."""
    served = ServedProcesses(session)
    backend = backend_for(session)
    source = run_data(config, backend)
    trainer = run_trainer(config, source, backend)
    trainer.build(source.training)
    data, watch = Metered(source.training, timing, served), Stopwatch(timing.steps)
    # One extra step, at which the CPU time after the last counted one is recorded.
    trainer.train(data, Plan(timing.last + 1, log_every=timing.steps), observers=watch)
    facts = from_all_ranks(backend, {"used": vars(data.used()), "rss": [peak_rss_mib(), *served.peak_rss_mib()]})
    own: dict[str, Any] = {
        "windows_ms": watch.windows_ms[timing.warm_up : timing.warm_up + timing.windows],
        "settings": process_settings(session.plan.threads, malloc=session.malloc),
        "parameters": trainer.state.parameters(),
    }
    if timing.breakdown and backend.name in WITH_BREAKDOWN:
        own["breakdown_ms"] = _breakdown(session, config=config, trainer=trainer, data=source.training, timing=timing)
    used, peaks = [Usage(**fact["used"]) for fact in facts], [rss for fact in facts for rss in fact["rss"]]
    return merged(own, used=used, rss=peaks, steps=timing.last - timing.first)


def from_all_ranks(backend: Backend, fact: Any) -> list[Any]:
    """Return the `fact` of all ranks, of JSON types."""
    return [json.loads(text) for text in backend.gather_bytes(json.dumps(fact).encode(), timeout=GATHER_TIMEOUT_S)]


def _breakdown(
    session: Session, config: Config, trainer: Trainer, data: TrainingData, timing: Timing
) -> dict[str, float]:
    variants = breakdown(session, config=config, trainer=trainer, data=data, timing=timing)
    by_rank = from_all_ranks(trainer.backend, variants.times_ms)
    return variants.parts(by_rank)
