"""What a training run tells its observers: the records, and the Protocol that receives them.

Epochs are counted from 0 in every record, steps by how many are finished: after the first optimizer step
``step`` is 1 and ``epoch`` is 0. A display adds one to the epoch.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class RunInfo:
    """What is known about a run before its first step."""

    recipe: str
    """Name of the recipe, or of the model where a user's own script trains."""
    backend: str
    """``horovod``, ``single`` …"""
    world_size: int
    """Number of replicas: ranks, or parts of one process; where ranks have roles, of all of them."""
    launcher: str
    """Who started the ranks: ``horovodrun``, ``mpirun``, ``srun`` … ``none``."""
    controller: str | None
    """What tensors travel over: ``mpi``, ``gloo``, ``ring`` …; None where there is no choice, or no exchange."""
    global_batch: int
    """Samples per optimizer step over all ranks."""
    per_replica_batch: int
    """Samples per optimizer step of one rank."""
    total_steps: int
    """Step at which training ends, counted from the start of training, not from the resumed step."""
    steps_per_epoch: int
    """Optimizer steps in one pass over the data."""
    parameters: int
    """Number of trainable parameters."""
    start_step: int = 0
    """Steps that were finished before this run began (it resumes), else 0."""
    run_dir: Path | None = None
    """Folder the run writes to, where there is one."""
    accumulate: int = 1
    """Microbatches that a rank's part of the batch is cut into."""
    learning_rate: str = ""
    """The learning rate in one phrase: its peak, what that was scaled from, warm-up, schedule."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the step that are not at their defaults."""
    threads: int | None = None
    """Threads an operation may use on each rank, where it is known."""

    processes: int | None = None
    """Number of processes; None: one for each replica."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """How many ranks are what, where they have different roles and each step is taken by one of the workers."""

    @property
    def replica_word(self) -> str:
        """What a replica is called: ``rank`` where it is a process."""
        return "rank" if self.processes in (None, self.world_size) else "replica"

    @property
    def microbatch(self) -> int:
        """Samples that go through a rank's model at once."""
        return self.per_replica_batch // self.accumulate

    @property
    def epochs(self) -> int:
        """Passes over the data, the last one possibly cut short."""
        return math.ceil(self.total_steps / self.steps_per_epoch)


@dataclass(frozen=True)
class StepRecord:
    """A logged optimizer step; its figures are over all ranks."""

    step: int
    """Finished optimizer steps, this one included."""
    epoch: int
    """Epoch this step belongs to, from 0."""
    loss: float
    """Training loss per sample since the last logged step."""
    learning_rate: float
    """Learning rate this step was taken with."""
    samples_per_second: float
    """Samples trained per second over all ranks since the last logged step."""
    grad_norm: float | None = None
    """Norm of the whole reduced gradient before clipping; None where it was not measured."""
    loss_scale: float | None = None
    """What the loss was multiplied by after this step; None without loss scaling."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Training metrics by name, such as ``accuracy``, of this step's global batch."""


@dataclass(frozen=True)
class EvaluationRecord:
    """One evaluation over all validation data."""

    step: int
    """Finished optimizer steps at the time of the evaluation."""
    epoch: int
    """Epoch that was trained last, from 0: the evaluation after the first epoch says 0."""
    loss: float
    """Validation loss per sample."""
    seconds: float
    """Wall time the evaluation took."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Validation metrics by name, with no ``val_`` before it."""


class Observer(Protocol):
    """Someone who watches a run. Called on rank 0 only, in the order of the methods below."""

    def on_start(self, info: RunInfo) -> None:
        """Receive what the run is, before its first step."""

    def on_progress(self, step: int) -> None:
        """Notice that ``step`` steps are finished; called after every step, under 2 µs on average."""

    def on_step(self, record: StepRecord) -> None:
        """Receive the figures of a logged step."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Receive the outcome of an evaluation."""

    def on_message(self, text: str) -> None:
        """Receive a warning or notice meant for the console."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Receive what ``summary.json`` will hold; not called where training failed."""

    def close(self) -> None:
        """Let go of files and terminal; called once, also where training failed."""


class BaseObserver:
    """An observer that ignores everything: override what is of interest."""

    def on_start(self, info: RunInfo) -> None:
        """Ignore the start."""

    def on_progress(self, step: int) -> None:
        """Ignore a finished step."""

    def on_step(self, record: StepRecord) -> None:
        """Ignore a logged step."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Ignore an evaluation."""

    def on_message(self, text: str) -> None:
        """Ignore a message."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Ignore the end."""

    def close(self) -> None:
        """Have nothing to close."""


class Observers(BaseObserver):
    """Several observers as one; with none at all it costs next to nothing."""

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = tuple(observers)
        self._on_progress = tuple(_progress_listeners(self._observers))

    def on_start(self, info: RunInfo) -> None:
        """Tell every observer what the run is."""
        for observer in self._observers:
            observer.on_start(info)

    def on_progress(self, step: int) -> None:
        """Tell those observers that listen to every step."""
        for listener in self._on_progress:
            listener(step)

    def on_step(self, record: StepRecord) -> None:
        """Pass a logged step on to every observer."""
        for observer in self._observers:
            observer.on_step(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Pass an evaluation on to every observer."""
        for observer in self._observers:
            observer.on_evaluation(record)

    def on_message(self, text: str) -> None:
        """Pass a message on to every observer."""
        for observer in self._observers:
            observer.on_message(text)

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Tell every observer how the run ended."""
        for observer in self._observers:
            observer.on_end(summary)

    def close(self) -> None:
        """Close every observer, also where closing one of them fails; the last to fail is raised."""
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.close)


def _progress_listeners(observers: Iterable[Observer]) -> Iterable[Callable[[int], None]]:
    """Return the ``on_progress`` of those who do something in it."""
    for observer in observers:
        if getattr(type(observer), "on_progress", None) is not BaseObserver.on_progress:
            yield observer.on_progress
