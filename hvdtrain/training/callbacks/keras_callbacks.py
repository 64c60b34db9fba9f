"""Keras callbacks in the training loop, through Keras' CallbackList."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras import is_default_hook, last_compile, profiles_batches
from hvdtrain.compat.tensorflow import compiled
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.registry import optional_package
from hvdtrain.observability.events import Observer, Observers
from hvdtrain.observability.tracker import Tracker
from hvdtrain.optim.averaging import averages_weights
from hvdtrain.state.callbacks import callback_states, held_weights, restore_callbacks
from hvdtrain.state.hashes import Holders, checksum
from hvdtrain.state.named_tensors import NamedTensor, placed_tensor
from hvdtrain.state.optimizers import optimizers_of, rate_of
from hvdtrain.state.structure import structure_of
from hvdtrain.state.variables import restoring, unwrap
from hvdtrain.training.callbacks.base import Outcome, StepEnd
from hvdtrain.training.evaluation.evaluate import EvaluationHooks

_callbacks = keras.callbacks


def check_callback(callback: Any) -> None:
    """Reject unsupported callbacks. Raises ConfigError with the reason."""
    if isinstance(callback, _callbacks.BackupAndRestore):
        raise ConfigError(
            "BackupAndRestore would restore rank 0 alone here: Trainer.fit takes it, or trainer.resume(folder) before "
            "training goes on from a checkpoint."
        )
    if not isinstance(callback, _callbacks.Callback):
        raise ConfigError(f"callbacks must be keras.callbacks.Callback objects. Received: {callback!r}.")
    if isinstance(callback, _callbacks.TensorBoard):
        optional_package("tensorboard", "tensorboard", "keras.callbacks.TensorBoard")


def refuse_saves_within_epochs(callbacks: Sequence[Any]) -> None:
    """Reject callbacks that save after batches, when replicas' weights differ (ConfigError)."""
    for callback in tf.nest.flatten(list(callbacks)):
        if isinstance(callback, _callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise ConfigError(
                f"ModelCheckpoint(save_freq={callback.save_freq}) would save rank 0's own weights, which "
                f"{opt('local_steps')} "
                'averages later: use save_freq="epoch".'
            )


def refuse_copies_of_slices(callbacks: Sequence[Any], *, saves: bool) -> None:
    """Reject callbacks that would keep shards as the model (ConfigError).

    `saves` says whether checkpoints are written, which do not support such copies.
    """
    for callback in tf.nest.flatten(list(callbacks)):
        if isinstance(callback, _callbacks.ModelCheckpoint):
            raise ConfigError(
                f"{type(callback).__name__} would write the slices of one rank, and the model is split among several: "
                "write checkpoints by fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them by "
                "python -m hvdtrain checkpoint export."
            )
        if saves and isinstance(callback, _callbacks.EarlyStopping) and callback.restore_best_weights:
            raise ConfigError(
                f"{type(callback).__name__}(restore_best_weights=True) keeps weights of which each rank has slices, "
                "and checkpoints cannot take these yet: leave it out; --keep-best keeps the best checkpoint."
            )


WRITERS = (_callbacks.ModelCheckpoint, _callbacks.CSVLogger, _callbacks.TensorBoard, _callbacks.RemoteMonitor)
"""Callbacks that run on the first replica only; all others run on every replica with the same metrics."""
RATE_SETTERS = (_callbacks.ReduceLROnPlateau, _callbacks.LearningRateScheduler)
READ_LOGS = (_callbacks.TensorBoard, _callbacks.TerminateOnNaN, _callbacks.ProgbarLogger)
"""Callbacks that use nothing but the logs of a batch."""
_BATCH_HOOKS = ("on_batch_begin", "on_batch_end", "on_train_batch_begin", "on_train_batch_end")
_TEST_BATCH_HOOKS = ("on_test_batch_begin", "on_test_batch_end")


class CallbackNeeds(NamedTuple):
    """Events that any replica's callbacks need; providing them is a collective."""

    anything: bool
    batches: bool
    weights: bool
    """Callbacks of batches may read the model, whose statistics are then averaged after each."""
    test_batches: bool
    ends_on_nan: bool
    """A loss that is not finite ends the training by a callback, and is no error."""


def needs_of_all(callbacks: Sequence[Any], backend: Backend) -> CallbackNeeds:
    """Return the events that any replica's callbacks need.

    Collective. Raises ConfigError for an unsupported callback.
    """
    flat = tf.nest.flatten(list(callbacks))
    for callback in flat:
        check_callback(callback)
    mine = CallbackNeeds(
        anything=bool(flat),
        batches=any(map(_asks_for_batches, flat)),
        weights=any(_asks_for_batches(each) and not isinstance(each, READ_LOGS) for each in flat),
        test_batches=any(_overrides(callback, _TEST_BATCH_HOOKS) for callback in flat),
        ends_on_nan=any(isinstance(callback, _callbacks.TerminateOnNaN) for callback in flat),
    )
    trackers = trackers_in(flat)
    everyone = gather(backend, {**mine._asdict(), "trackers": [tracker.get_state() for tracker in trackers]})
    for place, tracker in enumerate(trackers):  # one run of all ranks, which is not left when rank 0 is another one
        states = [each["trackers"][place] for each in everyone if place < len(each["trackers"])]
        tracker.set_state(next((state for state in states if state["agreed"]), states[0]))
    return CallbackNeeds(**{name: any(needs[name] for needs in everyone) for name in CallbackNeeds._fields})


def trackers_in(callbacks: Sequence[Any]) -> list[Tracker]:
    """Return the callbacks that write to an experiment tracker."""
    return [callback for callback in tf.nest.flatten(list(callbacks)) if isinstance(callback, Tracker)]


def with_trackers(observers: Observer, callbacks: Sequence[Any], backend: Backend) -> Observer:
    """Return `observers` with the trackers among the callbacks, on rank 0."""
    trackers = trackers_in(callbacks) if backend.primary else []
    return Observers([observers, *trackers]) if trackers else observers


def callbacks_of_all(
    callbacks: Sequence[Any],
    model: Any,
    backend: Backend,
    *,
    params: Mapping[str, Any],
    averaged_weights: Callable[[], AbstractContextManager[None]] = nullcontext,
    add_history: bool = True,
) -> "KerasCallbacks | None":
    """Return the caller of this replica's `callbacks`; None if no replica has any. Collective.

    Arguments as for `KerasCallbacks`. Raises ConfigError for an unsupported callback.
    """
    needs = needs_of_all(callbacks, backend)
    if not needs.anything:
        return None
    return KerasCallbacks(
        callbacks,
        needs,
        model,
        backend=backend,
        params=params,
        averaged_weights=averaged_weights,
        add_history=add_history,
    )


def evaluation_callbacks(callbacks: Sequence[Any] | None, model: Any, backend: Backend) -> "KerasCallbacks | None":
    """Return the caller of the callbacks of `evaluate` or `predict`, if any, which every rank has. Collective.

    Raises ConfigError for an unsupported callback.
    """
    return callbacks_of_all(callbacks, model, backend, params={}, add_history=False) if callbacks else None


def go_on_writing(callbacks: Sequence[Any]) -> None:
    """Have callbacks go on with their files in a further world of an elastic training."""
    for callback in tf.nest.flatten(list(callbacks)):
        if isinstance(callback, _callbacks.CSVLogger):
            callback.append = True


def that_change_training(callbacks: Sequence[Any]) -> str:
    """Return the names of Keras callbacks that set weights or rates."""
    names = []
    for callback in tf.nest.flatten(list(callbacks)):
        restores = isinstance(callback, _callbacks.EarlyStopping) and callback.restore_best_weights
        if restores or isinstance(callback, RATE_SETTERS):
            names.append(type(callback).__name__)
    return ", ".join(names) or "none"


class KerasCallbacks(EvaluationHooks):
    """Calls a list of Keras callbacks like `Model.fit`.

    Every replica calls them with the same global metrics, so that they decide identically. If one requests a stop, all
    stop together: at the end of an epoch, or at a logged step. Callbacks that give the replicas different learning
    rates or weights are rejected.

    Args:
        callbacks: as for `Model.fit`.
        model: its optimizer is the one in use.
        params: the callbacks' `params`.
        averaged_weights: swaps in the EMA of the weights inside a context.
        add_history: record Keras' History.
    """

    def __init__(
        self,
        callbacks: Sequence[Any],
        needs: CallbackNeeds,
        model: Any,
        backend: Backend,
        params: Mapping[str, Any],
        *,
        averaged_weights: Callable[[], AbstractContextManager[None]],
        add_history: bool = True,
    ) -> None:
        flat = tf.nest.flatten(list(callbacks))
        mine = [callback for callback in flat if _acts(callback, backend.primary)]
        swapping = [callback for callback in flat if isinstance(callback, _callbacks.SwapEMAWeights)]
        if swapping and not any(map(averages_weights, optimizers_of(model).values())):
            raise ConfigError("SwapEMAWeights must be used when `use_ema=True` is set on the optimizer.")
        self.swaps = bool(swapping)
        self._swaps_at_epoch_ends = any(callback.swap_on_epoch for callback in swapping)
        self._backend = backend
        self._model = model
        self._averaged_weights = averaged_weights
        self.list = _callbacks.CallbackList(mine, add_history=add_history, model=model, **params)
        """Keras' own, of this replica's callbacks."""
        # Per-step metrics cost an exchange and a wait, so they are computed only if a callback needs them.
        self.needs = needs
        self._logs: dict[str, Any] = {}
        self._gather = compiled(
            lambda mine: backend.run(lambda: backend.everyone.all_gather(mine, name="callbacks/agreement"))
        )
        model.stop_training = False
        self._compiled = last_compile(model)

    @property
    def history(self) -> Any:
        """Keras' History of this training."""
        return self._model.history

    def states(self) -> list[dict[str, Any]]:
        """Return the callbacks' states, for `begin` of a resumed training."""
        return callback_states(self.list.callbacks)

    def held_weights(self, paths: Sequence[str]) -> dict[str, np.ndarray]:
        """Return the best weights held by the callbacks."""
        return held_weights(self.list.callbacks, paths)

    def begin(
        self,
        states: Sequence[Mapping[str, Any]] = (),
        held: Mapping[str, np.ndarray] | None = None,
        paths: Sequence[str] = (),
    ) -> None:
        """Begin training, restoring callback states and best weights. Collective."""
        self._holders = Holders(self._backend, self._weights())
        self.list.on_train_begin()
        self._refuse_compiling()
        restore_callbacks(self.list.callbacks, states, held, paths)
        self._agreed(weights=True)

    def end(self) -> None:
        """End training. Collective."""
        self.list.on_train_end(dict(self._logs))
        self._agreed(weights=True)

    def begin_step(self, step: StepEnd) -> None:
        """Begin a step, and its epoch with the first one."""
        if step.place == 0:
            self.list.on_epoch_begin(step.epoch)
        elif step.first:
            # What is resumed was saved after the epoch began: a rate times 0.8 is so already.
            with self._kept_numbers():
                self.list.on_epoch_begin(step.epoch)
        self._refuse_compiling()
        if self.needs.batches:
            self.list.on_train_batch_begin(step.place)

    def _refuse_compiling(self) -> None:
        """Raise ConfigError if a callback has compiled the model, which this training's steps would not notice."""
        if last_compile(self._model) is not self._compiled:
            raise ConfigError(
                f"A callback compiled {type(self._model).__name__} {self._model.name!r} during fit, whose steps keep "
                "the optimizer, losses and trained layers that it began with. End fit there (stop_training=True, or "
                "epochs=…), compile, and go on: hvdtrain.Trainer(model).fit(…)."
            )

    def _kept_numbers(self) -> AbstractContextManager[None]:
        """Return a context that restores the numbers of the model and its optimizers, such as learning rates."""
        held = [self._model, *optimizers_of(self._model).values()]
        return restoring(unwrap(variable) for each in held for variable in each.variables if not len(variable.shape))

    def end_step(self, step: StepEnd, results: Mapping[str, Any]) -> None:
        """End a step, with the results of the epoch so far; its number is Keras', as if no call had fewer steps."""
        self.list.on_train_batch_end(step.place + self._model.steps_per_execution - 1, dict(results))

    def begin_evaluation(self) -> None:
        """Begin the validation."""
        self.list.on_test_begin()

    def begin_test_step(self, number: int) -> None:
        """Begin a validation batch."""
        if self.needs.test_batches:
            self.list.on_test_batch_begin(number)

    def end_test_step(self, number: int, so_far: Callable[[], Mapping[str, Any]]) -> None:
        """End a validation batch, with loss and metrics so far."""
        if self.needs.test_batches:
            self.list.on_test_batch_end(number, dict(so_far()))

    def end_evaluation(self, logs: Mapping[str, Any]) -> None:
        """End the validation, with its loss and metrics."""
        self.list.on_test_end(dict(logs))

    def end_epoch(self, epoch: int, logs: Mapping[str, Any]) -> None:
        """End an epoch, with loss, metrics and validation metrics (`val_`)."""
        self._logs = dict(logs)
        with self._averaged_weights() if self._swaps_at_epoch_ends else nullcontext():
            self.list.on_epoch_end(epoch, dict(logs))
        self._refuse_compiling()

    def agree(self, step: StepEnd) -> Outcome:
        """Stop if a callback of any replica requests it. Collective.

        Raises ConfigError if the replicas have different learning rates or weights.
        """
        stops = self._agreed(weights=step.ends_epoch)
        return Outcome.STOP if stops else Outcome.CONTINUE

    def _agreed(self, *, weights: bool) -> bool:
        """Return whether any replica requests a stop, after comparing rates and optionally weights. Collective."""
        held = optimizers_of(self._model).values()
        mine_rates = [float(rate_of(optimizer)) for optimizer in held]
        sums = self._sums_of_weights() if weights else []
        mine = tf.constant([[float(self._model.stop_training), *mine_rates, *sums]], tf.float64)
        table = self._gather(mine).numpy()
        for rates in table[:, 1 : 1 + len(mine_rates)].T:
            self._check_rates(rates)
        if sums and (differing := self._holders.differing(table[:, -len(sums) :])) is not None:
            raise ConfigError(
                f"Rank {differing[0]} holds other weights than rank {differing[1]}. Callbacks that set weights must be "
                "on every rank and set them alike; a layer that counts something by itself, from the samples of its "
                "own rank, is another cause."
            )
        return bool(table[:, 0].any())

    def _weights(self) -> dict[str, NamedTensor]:
        weights = structure_of(self._model).by_path(self._model.weights)
        return {path: placed_tensor(weight) for path, weight in weights.items()}

    def _sums_of_weights(self) -> list[float]:
        """Return a checksum for each group of ranks with the same weights."""
        if self._backend.job_size == 1:
            return []
        hashes = {path: checksum({path: t.value}) for path, t in self._holders.shared(self._weights()).items()}
        # In 48 bits, which float64 holds.
        return [float(int(value) & 0xFFFFFFFFFFFF) for value in self._holders.sums(hashes)]

    def _check_rates(self, rates: np.ndarray) -> None:
        """Reject differing learning rates [ranks] of one optimizer."""
        if (rates != rates[0]).any():
            other = int(np.flatnonzero(rates != rates[0])[0])
            raise ConfigError(
                f"A callback set the learning rate {rates[other]:g} on rank {other} and {rates[0]:g} on rank 0: "
                "callbacks must decide alike on every rank, from the figures that they are given."
            )


def _acts(callback: Any, primary: bool) -> bool:
    if isinstance(callback, _callbacks.SwapEMAWeights):
        return False  # an update rule may hold slices of the averages, and swaps them by itself
    if not primary:
        if isinstance(callback, WRITERS):
            return False
        if hasattr(callback, "verbose"):
            callback.verbose = 0
    return True


def _asks_for_batches(callback: Any) -> bool:
    """Return whether a callback acts on batches; Keras' own no-op methods are marked as such."""
    if isinstance(callback, _callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    if isinstance(callback, _callbacks.TensorBoard):
        return callback.update_freq != "epoch" or profiles_batches(callback)
    return _overrides(callback, _BATCH_HOOKS)


def _overrides(callback: Any, hooks: Sequence[str]) -> bool:
    return any(not is_default_hook(getattr(callback, hook)) for hook in hooks)
