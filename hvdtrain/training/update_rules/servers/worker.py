"""A worker: its connection to the servers, and the slices that it trains on.

It takes one slice after the other, with nothing to wait for until a step is measured.

Slice t of a training is that of worker t mod N in step t div N, for N workers. Where samples can be read by their
numbers, a worker that is free takes the next slice, whichever rank's it would be: one that is slow takes fewer.
Elsewhere, and with a bound on the staleness, each takes its own.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import numpy as np

from hvdtrain.data.batch import Batch
from hvdtrain.data.order import Order
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.runtime.messages import Messages
from hvdtrain.training.step.contract import CompiledStep, Measured, StepResult, Totals
from hvdtrain.training.update_rules.servers.layout import HEADER, PULL, PUSH, TICKET, ServerLayout
from hvdtrain.training.update_rules.servers.server import PARTS, TICKETS, TO_SERVER, TO_WORKER


class Pulled(NamedTuple):
    """Values of one server's variables: flat, and of tables the rows that have changed."""

    flats: list[np.ndarray]
    rows: list[tuple[np.ndarray, np.ndarray]]


class Connection:
    """Pushes to and pulls from all servers. One thread pushes and pulls, another one may take slices."""

    def __init__(self, messages: Messages) -> None:
        self._messages = messages
        self.layouts: Sequence[ServerLayout] = []
        """Of each server; one that owns nothing is not asked."""
        self.versions = [0] * messages.size
        """Of each server, the version of the parameters that this worker has."""
        self.asked = False
        """Whether a pull was asked for, and not received yet."""

    def push(
        self, step: int, share: float, weight: float, arrays: Sequence[Sequence[np.ndarray]], *, versions: Sequence[int]
    ) -> None:
        """Send each server its gradients of `step`, at parameters of `versions`; none for a `weight` of 0."""
        for server, parts in enumerate(arrays):
            if not self.layouts[server].entries:
                continue
            self._send(server, PUSH, step, version=versions[server], share=share, weight=weight)
            self._messages.send(server, PARTS, *parts)

    def ask(self, step: int) -> None:
        """Ask for the parameters of `step`."""
        for server, version in enumerate(self.versions):
            if self.layouts[server].entries:
                self._send(server, PULL, step, version=version)
        self.asked = True

    def pulled(self) -> list[Pulled]:
        """Wait for the parameters that were asked for."""
        self.asked = False
        return [self._pulled_from(server, layout) for server, layout in enumerate(self.layouts)]

    def take_slice(self, era: int, first: int) -> int:
        """Return the number of the next slice that nobody has taken in this era, whose first one is `first`."""
        ticket = np.zeros(1, np.int64)
        self._send(0, TICKET, era, version=first)
        self._messages.receive(0, TICKETS, ticket)
        return int(ticket[0])

    def _pulled_from(self, server: int, layout: ServerLayout) -> Pulled:
        if not layout.entries:
            return Pulled([], [])
        header, flats = np.zeros(1, HEADER), layout.flat_buffers(layout.whole)
        for array in (header, *flats):
            self._messages.receive(server, TO_WORKER, array)
        rows = []
        for entry in layout.tables:
            count = np.zeros(1, np.int64)
            self._messages.receive(server, TO_WORKER, count)
            indices, values = np.empty(count[0], np.int64), np.empty((count[0], *entry.shape[1:]), entry.dtype)
            for array in (indices, values):
                self._messages.receive(server, TO_WORKER, array)
            rows.append((indices, values))
        self.versions[server] = int(header[0]["version"])
        return Pulled(flats, rows)

    def _send(
        self, server: int, kind: int, step: int, *, version: int, share: float = 0.0, weight: float = 0.0
    ) -> None:
        self._messages.send(server, TO_SERVER, np.array([(kind, step, version, share, weight)], HEADER))


class Slice(NamedTuple):
    """Some replica's slice of a global batch."""

    step: int
    """The optimizer step, from 0."""
    draws: int
    """Number by which layers draw random numbers."""
    batch: Batch


class PacedData:
    """The slices that this worker takes: yields each step's number, from 1, with any number of them.

    Args:
        index: of this rank among the `workers`; beyond them, one that only serves, and yields slices that do not count.
        take: returns the number of the next slice that nobody has taken in an era, whose first one is given; None: each
            worker takes its own.
        ahead: optimizer steps less places in the data, which differ where earlier epochs had another number of steps.
    """

    def __init__(
        self, data: TrainingData, index: int, workers: int, take: Callable[[int, int], int] | None, *, ahead: int = 0
    ) -> None:
        self.steps_per_epoch = data.steps_per_epoch
        self.pass_steps = data.pass_steps
        self.batch = data.batch
        self.remedy = data.remedy
        self._data = data
        self._index = index
        self._workers = workers
        self._take = take
        self._ahead = ahead
        self._eras = itertools.count()

    def batches(self, start_step: int) -> Iterator[Any]:
        """Yield the slices of each step, from the place `start_step` in the data on."""
        first = start_step + self._ahead
        if self._take is None or not shares_slices(self._data):
            for step, batch in enumerate(self._data.batches(start_step), first):
                yield step + 1, [Slice(step, step, batch)]
            return
        assert isinstance(self._data, SourceTraining), "others are not shared"
        data, take, workers, era = self._data, self._take, self._workers, next(self._eras)

        def fetch(number: int | None = None) -> Slice:
            number = take(era, (start_step + 1) * workers) if number is None else number
            place, index = divmod(number, workers)
            return Slice(place + self._ahead, number + self._ahead * workers, data.slice_at(place, index, workers))

        if self._index >= workers:
            # It computes once, to learn how gradients travel.
            empty = data.slice_at(start_step, 0, workers)._replace(has_samples=0.0)
            yield first + 1, [Slice(first, first * workers, empty)]
            for step in itertools.count(first + 1):
                yield step + 1, []
        with ThreadPoolExecutor(1, "hvdtrain-slices") as reader:
            # Of the first step each takes its own: a server must have compiled the update that others wait for.
            coming = [reader.submit(fetch, start_step * workers + self._index)]
            try:
                for step in itertools.count(first):
                    yield step + 1, _until(step, coming, lambda: reader.submit(fetch))
            finally:
                wait(coming)


def _until(step: int, coming: list[Future[Slice]], fetch: Callable[[], Future[Slice]]) -> Iterator[Slice]:
    """Yield the slices of `step`; the first one of a later step stays in `coming`."""
    while (taken := coming[0].result()).step <= step:
        coming[0] = fetch()  # read beside the step
        yield taken


def shares_slices(data: TrainingData) -> bool:
    """Return whether any worker can read any slice."""
    return isinstance(data, SourceTraining) and type(data.order) is Order and not data.read_options.tolerated


class PacedStep(CompiledStep):
    """Trains on the slices of a step, each of which is an update; a measured step ends on all ranks together.

    Args:
        step: trains on one slice.
        begin: called before each slice.
        end: called after each step with its number, from 1.
        part: called where workers go on at their own pace after they have met. Collective.
        meet: waits for all ranks, before anything is exchanged among all. Collective.
        measure: measures a step, when all ranks have come to its end. Collective.
        total: makes totals of this replica those of all, when they are read.
    """

    def __init__(
        self,
        step: CompiledStep,
        *,
        begin: Callable[[Slice], None],
        end: Callable[[int], None],
        part: Callable[[], None],
        meet: Callable[[], None],
        measure: Callable[[], Measured],
        total: Callable[[np.ndarray], Totals],
    ) -> None:
        self._step = step
        self._begin = begin
        self._end = end
        self._part = part
        self._meet = meet
        self._together = False
        """Whether all ranks have met since the last step."""
        self._measure = measure
        self._total = total

    def __call__(self, batch: Any, *, measure: bool) -> StepResult:
        """Train on the slices of a step, (number, slices); `measure` waits for the other ranks."""
        number, slices = batch
        if self._together:
            self._part()
        totals = np.zeros(3, np.float32)
        for each in slices:
            self._begin(each)
            totals += self._step(each.batch, measure=False).totals.numpy()
        self._end(number)
        self._together = False
        if measure:
            self._come_together()
        return StepResult(self._total(totals), self._measure() if measure else None)

    def _come_together(self) -> None:
        if not self._together:
            self._meet()
        self._together = True

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the epoch's metrics, or restore them."""
        self._step.begin_metrics(sums)

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return each metric's state by name, over all replicas. Collective."""
        self._come_together()
        return self._step.metric_sums()

    def recent_metrics(self) -> Mapping[str, Any]:
        """Return the metrics since the last call in the epoch. Collective."""
        self._come_together()
        return self._step.recent_metrics()

    def show_metrics(self) -> None:
        """Let the model's metrics hold those of all replicas. Collective."""
        self._come_together()
        self._step.show_metrics()

    def results_of_step(self) -> Mapping[str, Any]:
        """Return what the last step returned. Collective."""
        self._come_together()
        return self._step.results_of_step()

    def metrics_so_far(self) -> Mapping[str, Any]:
        """Return the metrics of the epoch so far. Collective."""
        self._come_together()
        return self._step.metrics_so_far()

    def epoch_metrics(self) -> Mapping[str, Any]:
        """Return the metrics of the epoch. Collective."""
        self._come_together()
        return self._step.epoch_metrics()
