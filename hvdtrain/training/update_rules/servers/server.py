"""One rank's server: a thread that applies the workers' gradients to the parameters that it owns.

Stale gradients are compensated as `options.compensation` says. w are the present parameters, w' those that the gradient
g was computed at, tau the updates between them.

- `rate` (Zhang et al. 2015, arXiv:1511.05950): the learning rate is divided by tau.
- `dc_asgd` (Zheng et al. 2017, arXiv:1609.08326, equation 10): g + lambda g^2 (w - w').
- `adaptive` (the same, section 5): lambda is lambda_0 / sqrt(s + 1e-7), with the mean square s <- m s + (1 - m) g^2,
  of a table in the rows that have a gradient.
"""

import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.compat.keras_variables import updating_at
from hvdtrain.config.errors import MissingRankError
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import loss_scale_of
from hvdtrain.runtime.messages import Messages, Pause
from hvdtrain.state.optimizers import rate_at, rate_of
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.servers.layout import HEADER, PULL, PUSH, TICKET, Entry, ServerLayout
from hvdtrain.training.update_rules.servers.record import Event

TO_SERVER, PARTS, TO_WORKER, TICKETS = range(4)
"""Tags: headers for a server, what follows them, its replies, and its replies to a worker's reader of data."""
STRENGTHS = {"dc_asgd": 0.04, "adaptive": 2.0}
"""lambda and lambda_0 of Zheng et al."""
MEMORY, EPSILON = 0.95, 1e-7
_GRACE_S = 2.0


class Push:
    """A worker's gradients."""

    def __init__(self, worker: int, header: np.ndarray, layout: ServerLayout) -> None:
        self.worker = worker
        self.step, self.version = int(header["step"]), int(header["version"])
        self.share, self.weight = float(header["share"]), float(header["weight"])
        self.dense = layout.flat_buffers(layout.dense) if self.weight else []
        self.counts = np.zeros(len(layout.sparse), np.int64)
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []

    def receive(self, messages: Messages, layout: ServerLayout) -> None:
        """Receive what follows the header."""
        if not self.weight:
            return
        for array in self.dense:
            messages.receive(self.worker, PARTS, array)
        if layout.sparse:
            messages.receive(self.worker, PARTS, self.counts)
        for entry, count in zip(layout.sparse, self.counts, strict=True):
            indices, values = np.empty(count, np.int64), np.empty((count, *entry.shape[1:]), entry.dtype)
            for array in (indices, values):
                messages.receive(self.worker, PARTS, array)
            self.rows.append((indices, values))

    @property
    def arrays(self) -> list[np.ndarray]:
        """All gradients."""
        return [*self.dense, *(array for pair in self.rows for array in pair)]


class Server:
    """Owns some of the parameters: applies what workers push, in the order of arrival, and answers what they pull.

    With a bound on the staleness of 0 it adds up the gradients of a step and updates once, as an all-reduce does.

    Args:
        messages: to and from the workers.
        parameters: by path, the values that it updates; the optimizer is built for them, among others.
        workers: the ranks that train, the first ones.
        fail: ends the job with an error of this server's, unless the rank's own thread does.
        bound: steps that the fastest of them may be ahead of the slowest.
        replay: its actions in the run to repeat.
    """

    def __init__(
        self,
        messages: Messages,
        parameters: Mapping[str, Any],
        optimizer: Any,
        options: StepOptions,
        *,
        workers: int,
        fail: Callable[[BaseException], object],
        bound: int | None = None,
        replay: Sequence[Event] = (),
    ) -> None:
        self._messages = messages
        self._parameters = parameters
        self._optimizer = optimizer
        self._options = options
        self._bound = bound
        self._workers = workers
        self._fail = fail
        self._updates_per_step = 1 if self._bound == 0 else self._workers
        self.version = 0
        """Number of updates since the beginning of this training."""
        self.staleness: Counter[int] = Counter()
        """Updates by the number of others since their parameters were pulled."""
        self.slices = [0] * messages.size
        """Slices of batches that each worker has trained on."""
        self.events: list[Event] = []
        """Its actions in order, if they are recorded."""
        self._replay = deque(replay)
        self._layout: ServerLayout | None = None
        self._early: list[tuple[int, np.ndarray]] = []
        """Messages that came before the layout was known."""
        self._waiting: dict[Event, deque[Any]] = defaultdict(deque)
        self._steps = [0] * self._workers
        """Steps that each worker has completed."""
        self._of_step: dict[int, dict[int, Push]] = defaultdict(dict)
        self._sent: dict[int, deque[tuple[int, list[np.ndarray]]]] = defaultdict(deque)
        """Of each worker, the values that it got and their versions."""
        self._changed: dict[str, np.ndarray] = {}
        """Of a table, the update that last changed each row."""
        self._era, self._ticket = -1, 0
        self.updates = keras.Variable(0, dtype="int64", trainable=False, name="updates")
        """The optimizer's count of updates."""
        self._actions: dict[int, Callable[[int, Any], None]]
        self._actions = {PUSH: self._take, PULL: self._answer, TICKET: self._give_ticket}
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="hvdtrain-server", daemon=True)

    def begin(self, steps: int) -> None:
        """Begin to serve, after `steps` optimizer steps."""
        self.updates.assign(steps * self._updates_per_step)
        self._steps = [steps] * self._workers
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether it can take gradients."""
        return self._layout is not None

    def prepare(self, layout: ServerLayout) -> None:
        """Take over the variables of `layout`."""
        self._compensation = None
        if self._options.compensation in ("dc_asgd", "adaptive"):
            strength = self._options.dc_strength
            scale = loss_scale_of(self._optimizer)
            self._compensation = DelayCompensation(self._options.compensation, strength, layout.entries, scale)
        self._changed = {entry.path: np.zeros(entry.shape[0], np.int64) for entry in layout.tables}
        self._apply, self._read = self._compiled(layout)
        self._layout = layout
        self.note_sync()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()

    def check(self) -> None:
        """Raise what the thread has raised."""
        if self._error is not None:
            raise self._error

    def _serve(self) -> None:
        pause, header = Pause(), np.zeros(1, HEADER)
        try:
            while not self._stopping.is_set():
                worker = self._messages.arrived(TO_SERVER, header)
                if worker is not None:
                    pause.reset()
                    self._early.append((worker, header[0].copy()))
                elif not (self._early and self.ready):
                    self._messages.progress()
                    pause.sleep()
                    continue
                self._sort_in()
                while any(self._step(event) for event in self._possible()):
                    continue
        except BaseException as error:
            self._error = error  # raised by the rank's own thread, if it waits for messages: one that serves does not
            if not isinstance(error, MissingRankError) and not self._stopping.wait(_GRACE_S):
                self._fail(error)

    def _sort_in(self) -> None:
        """Let what came wait for its turn."""
        early, self._early = self._early, []
        for worker, header in early:
            kind = int(header["kind"])
            if kind != TICKET and self._layout is None:
                self._early.append((worker, header))
                continue
            self._waiting[kind, worker].append(self._received(kind, worker, header))

    def _received(self, kind: int, worker: int, header: np.ndarray) -> Any:
        """Return what came, with what follows the header."""
        if kind != PUSH:
            return header
        push = Push(worker, header, self._known)
        push.receive(self._messages, self._known)
        return push

    def _possible(self) -> Iterator[Event]:
        """Yield what may be done next."""
        if self._replay:
            yield self._replay[0]
        else:
            yield from [event for event, asked in self._waiting.items() if asked]

    def _step(self, event: Event) -> bool:
        """Do what a worker waits for, unless it has to wait longer; return whether it was done."""
        kind, worker = event
        asked = self._waiting[event]
        if not asked or (kind == PULL and not self._may_go_on(int(asked[0]["step"]))):
            return False
        if self._options.record is not None:
            self.events.append(event)  # before the answer, after which the worker may read them
        if self._replay:
            self._replay.popleft()
        self._actions[kind](worker, asked.popleft())
        return True

    def _may_go_on(self, step: int) -> bool:
        """Return whether a worker may begin `step`."""
        return self._bound is None or min(self._steps) >= step - self._bound

    def _take(self, worker: int, push: Push) -> None:
        self.slices[worker] += push.weight > 0
        if worker >= self._workers:
            return  # a rank that only serves has told how gradients travel, and has none
        self._steps[worker] = push.step + 1
        if self._bound != 0:
            self._update(push)
            return
        self._of_step[push.step][worker] = push
        if len(self._of_step[push.step]) == self._workers:
            pushed = self._of_step.pop(push.step)
            self._update_together([pushed[each] for each in sorted(pushed) if pushed[each].weight])

    def _update(self, push: Push) -> None:
        if not push.weight:
            return
        staleness = self.version - push.version
        self.staleness[staleness] += 1
        factor = push.share * self._workers / max(1, staleness) if self._options.compensation == "rate" else push.share
        before = self._sent_at(push.worker, push.version) if self._compensation is not None else []
        self._run(push.step, push.arrays, factor=factor, before=before)

    def _update_together(self, pushed: Sequence[Push]) -> None:
        if not pushed:
            return
        self.staleness[0] += 1
        total = sum(push.weight for push in pushed)
        dense = [
            sum(array * (push.weight / total) for push, array in zip(pushed, arrays, strict=True))
            for arrays in zip(*(push.dense for push in pushed), strict=True)
        ]
        rows = []
        for pairs in zip(*(push.rows for push in pushed), strict=True):
            rows.append(np.concatenate([indices for indices, _ in pairs]))
            rows.append(
                np.concatenate(
                    [values * (push.weight / total) for push, (_, values) in zip(pushed, pairs, strict=True)]
                )
            )
        self._run(pushed[0].step, [*dense, *rows])

    def _run(self, step: int, arrays: Sequence[Any], *, factor: float = 1.0, before: Sequence[np.ndarray] = ()) -> None:
        given = [tf.convert_to_tensor(array) for array in arrays]
        self._apply(tf.constant(step, tf.int64), tf.constant(factor, tf.float64), given, list(map(tf.constant, before)))
        self.version += 1
        sparse = self._known.sparse
        first = len(given) - 2 * len(sparse)
        for place, entry in enumerate(sparse):
            if entry.by_rows:
                self._changed[entry.path][arrays[first + 2 * place]] = self.version

    def _answer(self, worker: int, header: np.ndarray) -> None:
        """Send the values that a worker lacks."""
        dense = self._flat_values()
        reply = np.zeros(1, HEADER)
        reply["version"] = self.version
        rows = []
        for entry in self._known.tables:
            indices = np.flatnonzero(self._changed[entry.path] > int(header["version"]))
            values = tf.gather(unwrap(self._parameters[entry.path]), indices).numpy()
            rows += [np.array([len(indices)]), indices, values]
        if self._compensation is not None and worker < self._workers:
            kept = self._sent[worker]
            kept.append((self.version, self._values()))
            if len(kept) > 3:
                kept.popleft()
        self._messages.send(worker, TO_WORKER, reply, *dense, *rows)

    def _flat_values(self) -> list[np.ndarray]:
        """Return the values that a worker pulls whole."""
        return [each.numpy() for each in self._read()]

    def _sent_at(self, worker: int, version: int) -> list[np.ndarray]:
        """Return the values of `version`, as a worker got them; the present ones if they were never sent."""
        for known, values in self._sent[worker]:
            if known == version:
                return values
        return self._values()

    def _values(self) -> list[np.ndarray]:
        return [unwrap(self._parameters[e.path]).numpy() for e in self._known.entries]

    @property
    def _known(self) -> ServerLayout:
        assert self._layout is not None, "gradients come after it"
        return self._layout

    def _give_ticket(self, worker: int, header: np.ndarray) -> None:
        """Number the next slice to train on; a new era begins at the ticket that it names."""
        if int(header["step"]) > self._era:
            self._era, self._ticket = int(header["step"]), int(header["version"])
        self._messages.send(worker, TICKETS, np.array([self._ticket]))
        self._ticket += 1

    def note_sync(self) -> None:
        """Note that all workers hold the present parameters."""
        if self.ready and self._compensation is not None:
            everything = self._values()
            for worker in range(self._workers):
                self._sent[worker] = deque([(self.version, everything)])

    def _compiled(self, layout: ServerLayout) -> tuple[Callable[..., Any], Callable[[], Sequence[tf.Tensor]]]:
        """Compile the update and the reading of all whole variables.

        The optimizer is changed while it is traced, so nobody else may use it meanwhile.
        """
        optimizer = innermost(self._optimizer)
        entries = layout.entries
        # Of the dtype that Keras' own has, by which optimizers may multiply; not to round what has 64 bits throughout.
        wide = entries and all(e.dtype == np.float64 for e in entries)
        dtype = "float64" if wide else rate_of(optimizer).dtype.name
        rate = keras.Variable(0.0, dtype=dtype, trainable=False, name="rate")

        def apply(step: tf.Tensor, factor: tf.Tensor, given: list[tf.Tensor], before: list[tf.Tensor]) -> None:
            dense = len(given) - 2 * len(layout.sparse)
            gradients: dict[str, Any] = layout.apart(layout.dense, given[:dense])
            for place, entry in enumerate(layout.sparse):
                indices, values = given[dense + 2 * place : dense + 2 * place + 2]
                unique, where = tf.unique(indices)
                summed = tf.math.unsorted_segment_sum(values, where, tf.size(unique))
                gradients[entry.path] = tf.IndexedSlices(summed, unique, tf.constant(entry.shape, tf.int64))
            if self._compensation is not None:
                for entry, value in zip(entries, before, strict=True):
                    now = unwrap(self._parameters[entry.path]).read_value()
                    gradients[entry.path] = self._compensation(entry.path, gradients[entry.path], now, value)
            rate.assign(tf.cast(rate_at(optimizer, step), tf.float64) * factor)
            with (
                updating_at(optimizer, self.updates, rate, updates_per_step=self._updates_per_step),
                fused_updates(self._optimizer),
            ):
                self._optimizer.apply([gradients[e.path] for e in entries], [self._parameters[e.path] for e in entries])

        flats = layout.flat_buffers(layout.dense)
        specs: list[tf.TensorSpec] = [tf.TensorSpec(flat.shape, flat.dtype) for flat in flats]
        for entry in layout.sparse:
            specs += [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, *entry.shape[1:]], entry.dtype)]
        backups = [tf.TensorSpec(e.shape, e.dtype) for e in entries] if self._compensation is not None else []
        scalars = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float64)
        function: Callable[..., Any] = (
            tf.function(apply, autograph=False).get_concrete_function(*scalars, specs, backups)
            if entries
            else lambda *_: None
        )

        def read() -> list[tf.Tensor]:
            values = {e.path: unwrap(self._parameters[e.path]).read_value() for e in layout.whole}
            return layout.flat(layout.whole, values)

        return function, tf.function(read, autograph=False).get_concrete_function()


class DelayCompensation:
    """DC-ASGD on one server's variables, whose gradients come multiplied by a loss `scale`."""

    def __init__(self, name: str, strength: float | None, entries: list[Entry], scale: float = 1.0) -> None:
        self._scale = scale
        self._strength = STRENGTHS[name] if strength is None else strength
        self._squares: Mapping[str, tf.Variable] = {}
        if name == "adaptive":
            self._squares = {e.path: tf.Variable(tf.zeros(e.shape, e.dtype), trainable=False) for e in entries}

    def __call__(
        self, path: str, gradient: tf.Tensor | tf.IndexedSlices, now: tf.Tensor, before: tf.Tensor
    ) -> tf.Tensor | tf.IndexedSlices:
        """Return the compensated gradient of the variable `path`, whose values are `now` and were `before`."""
        if isinstance(gradient, tf.IndexedSlices):
            rows = gradient.indices
            values = self._of(path, gradient.values, tf.gather(now - before, rows), rows=rows)
            return tf.IndexedSlices(values, rows, gradient.dense_shape)
        return self._of(path, gradient, now - before)

    def _of(self, path: str, gradient: tf.Tensor, moved: tf.Tensor, *, rows: tf.Tensor | None = None) -> tf.Tensor:
        squared = tf.square(gradient / self._scale)
        strength = tf.constant(self._strength, gradient.dtype)
        if path in self._squares:
            kept = self._squares[path]
            mean = MEMORY * (kept if rows is None else tf.gather(kept, rows)) + (1 - MEMORY) * squared
            kept.assign(mean) if rows is None else kept.scatter_update(tf.IndexedSlices(mean, rows))
            strength = strength / tf.sqrt(mean + EPSILON)
        return gradient + self._scale * strength * squared * moved
