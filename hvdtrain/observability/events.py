"""The records that training emits, and the observers that receive them.

In every record epochs count from 0, and steps count finished ones: after the first optimizer step ``step`` is 1 and
``epoch`` is 0. Displays add one to the epoch.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.config.errors import in_script
from hvdtrain.config.parallel import DATA_AXES
from hvdtrain.runtime.logs import LOGGER, drop_unreadable_output


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """Facts about a run, known before its first step."""

    recipe: str
    """Name of the recipe, or of the model in a user's own script."""
    backend: str
    """``horovod``, ``single`` …"""
    world_size: int
    """Number of replicas; of all ranks with a parameter server, or where several ranks share a replica."""
    launcher: str
    """Launcher of the ranks: ``horovodrun``, ``mpirun``, ``srun`` … ``none``."""
    controller: str | None
    """Transport of tensors: ``mpi``, ``gloo``, ``ring`` …; None if there is no choice, or no exchange."""
    global_batch: int
    """Samples per optimizer step over all ranks."""
    per_replica_batch: int
    """Samples per optimizer step of one rank."""
    total_steps: int
    """Step at which training ends, counted from the start of training even if resumed."""
    steps_per_epoch: int
    """Optimizer steps in one pass over the data."""
    parameters: int
    """Number of trainable parameters."""
    start_step: int = 0
    """Steps finished before this run, if it was resumed; else 0."""
    begin_epoch: int = 0
    """An epoch, from 0, from which the others are counted: the one under way at the start."""
    begin_step: int = 0
    """Steps finished before the first one of that epoch."""
    run_dir: Path | None = None
    """Folder of the run, if there is one."""
    accumulate: int = 1
    """Microbatches per replica and optimizer step."""
    learning_rate: str = ""
    """The learning rate in words: peak, scaling, warm-up, schedule."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the step that differ from their defaults."""
    threads: int | None = None
    """Threads per operation on each rank, if known."""
    wording: Callable[[str], str] = in_script
    """Words the options in messages: as a script's arguments, or as flags of the command line."""

    processes: int | None = None
    """Number of processes; None: one per replica."""
    roles: Mapping[str, int] = field(default_factory=dict)
    """Number of ranks by role, if each step is taken by one of several workers."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """Sizes of the axes of the mesh, if the model is split along one of them."""

    @property
    def replica_word(self) -> str:
        """The word for a replica: ``rank`` if it is a process."""
        if self.replicas != self.world_size:
            return "replica"
        return "rank" if self.processes in (None, self.world_size) else "replica"

    @property
    def replicas(self) -> int:
        """Number of those that are given different samples."""
        return self.world_size // math.prod(size for axis, size in self.axes.items() if axis not in DATA_AXES)

    @property
    def microbatch(self) -> int:
        """Samples in one forward pass of a replica."""
        return self.per_replica_batch // self.accumulate

    @property
    def epochs(self) -> int:
        """Number of the last epoch, counted from 1; it may be cut short."""
        return self.begin_epoch + math.ceil((self.total_steps - self.begin_step) / self.steps_per_epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch, from 0, of step `step`, counted from 1."""
        return self.begin_epoch + max(0, step - 1 - self.begin_step) // self.steps_per_epoch


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """A logged optimizer step, with figures over all ranks."""

    step: int
    """Finished optimizer steps, this one included."""
    epoch: int
    """Epoch of the step, from 0."""
    loss: float | None
    """Training loss per sample since the last logged step; None for a model's own step that returns none."""
    learning_rate: float
    """Learning rate of this step."""
    samples_per_second: float
    """Samples trained per second over all ranks since the last logged step."""
    grad_norm: float | None = None
    """Global norm of the reduced gradient before clipping; None if not measured."""
    loss_scale: float | None = None
    """Loss scale after this step; None without loss scaling."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Training metrics since the last logged step by name, such as ``accuracy``: numbers, or arrays such as one value
    for each class."""
    so_far: Mapping[str, Any] = field(default_factory=dict)
    """Loss and metrics of the epoch so far, as displays show them."""


@dataclass(frozen=True, kw_only=True)
class EvaluationRecord:
    """One evaluation over all validation data."""

    step: int
    """Finished optimizer steps at the time of the evaluation."""
    epoch: int
    """Last epoch trained, from 0: 0 in the evaluation after the first epoch."""
    loss: float | None
    """Validation loss per sample; None for a model's own step that returns none."""
    seconds: float
    """Wall time of the evaluation."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Validation metrics by name, without the prefix ``val_``."""


@dataclass(frozen=True)
class EpochRecord:
    """An epoch that ended, on time or cut short; sent after its evaluation."""

    step: int
    """Finished optimizer steps."""
    epoch: int
    """The epoch, from 0."""
    figures: Mapping[str, Any]
    """Loss and metrics over its samples, then those of its evaluation with the prefix ``val_``."""


class Observer:
    """Receives the events of a run, on rank 0 only, in the order of the methods below; ignores those not overridden."""

    @property
    def output(self) -> str:
        """The output in words, for warnings."""
        return type(self).__name__

    @property
    def tells(self) -> bool:
        """Whether somebody reads the messages."""
        return type(self).on_message is not Observer.on_message

    def on_start(self, info: RunInfo) -> None:
        """Receive the facts about the run, before its first step."""

    def on_progress(self, step: int) -> None:
        """Receive the number of finished steps; called after every step, must take under 2 µs on average."""

    def on_step(self, record: StepRecord) -> None:
        """Receive the figures of a logged step."""

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Receive the results of an evaluation."""

    def on_epoch(self, record: EpochRecord) -> None:
        """Receive the figures of an epoch that ended."""

    def on_message(self, text: str) -> None:
        """Receive a warning or notice for the console."""

    def on_end(self, summary: Mapping[str, Any]) -> None:
        """Receive the contents of ``summary.json``; not called if training failed."""

    def close(self) -> None:
        """Release files and terminal; called once, also if training failed."""


class Observers(Observer):
    """Several observers as one.

    One that can no longer write, to a pipe that nobody reads or a full disk, is left out from then on, with a warning:
    what only watches a training does not end it.
    """

    def __init__(self, observers: Iterable[Observer] = ()) -> None:
        self._observers = list(observers)
        self._failed: list[Observer] = []
        self._on_progress = list(_progress_listeners(self._observers))

    @property
    def tells(self) -> bool:
        return any(observer.tells for observer in self._observers)

    def on_start(self, info: RunInfo) -> None:
        """Pass the facts about the run on to every observer; here a file that cannot be written is an error."""
        self._each(lambda observer: observer.on_start(info), BrokenPipeError)

    def on_progress(self, step: int) -> None:
        """Pass the number of steps on to the observers that override `on_progress`."""
        try:
            for listener in self._on_progress:
                listener(step)
        except OSError:
            self._each(lambda observer: observer.on_progress(step))

    def on_step(self, record: StepRecord) -> None:
        self._each(lambda observer: observer.on_step(record))

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._each(lambda observer: observer.on_evaluation(record))

    def on_epoch(self, record: EpochRecord) -> None:
        self._each(lambda observer: observer.on_epoch(record))

    def on_message(self, text: str) -> None:
        self._each(lambda observer: observer.on_message(text))

    def on_end(self, summary: Mapping[str, Any]) -> None:
        self._each(lambda observer: observer.on_end(summary))

    def close(self) -> None:
        """Close every observer, even if closing one fails; the last error is raised."""
        for observer in self._failed:
            with suppress(OSError):
                observer.close()
        with ExitStack() as stack:
            for observer in reversed(self._observers):
                stack.callback(observer.close)

    def _each(self, tell: Callable[[Observer], None], harmless: type[OSError] = OSError) -> None:
        for observer in list(self._observers):
            try:
                tell(observer)
            except harmless as error:
                self._observers.remove(observer)
                self._on_progress = list(_progress_listeners(self._observers))
                self._failed.append(observer)
                drop_unreadable_output()
                LOGGER.warning(f"{observer.output} cannot be written any more ({error}). Training goes on without it.")


def _progress_listeners(observers: Iterable[Observer]) -> Iterable[Callable[[int], None]]:
    """Return the ``on_progress`` methods that are overridden."""
    for observer in observers:
        if getattr(type(observer), "on_progress", None) is not Observer.on_progress:
            yield observer.on_progress
