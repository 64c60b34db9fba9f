"""Optimizer step on one of several asynchronous workers."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, Future, Workers
from hvdtrain.data.batch import Batch, as_batch
from hvdtrain.state.optimizers import rate_of
from hvdtrain.state.structure import seed_states
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import unwrap
from hvdtrain.training.asynchronous.evaluate import Tally
from hvdtrain.training.step.finite import zero_if_finite
from hvdtrain.training.step.forward_backward import ForwardBackward
from hvdtrain.training.step.logs import StepLogs, Value
from hvdtrain.training.step.result import Measured, StepResult
from hvdtrain.training.update_rules.base import UpdateRule


class _Scope(keras.StatelessScope):
    """Keras' scope of values in place of those of variables.

    With `reads` it gives regularizers, which ask it for their variables, what is read of them when they ask: gradients
    reach the variables.
    """

    def __init__(self, values: Sequence[tuple[Any, Any]], *, reads: bool) -> None:
        super().__init__(values, collect_losses=True)
        self._reads = reads

    def get_current_value(self, variable: Any) -> Any:
        value = self.assigned(variable)
        asked = self._reads and value is None and variable.regularizer is not None
        return tf.convert_to_tensor(unwrap(variable)) if asked else value

    def assigned(self, variable: Any) -> Any:
        return super().get_current_value(variable)


@contextmanager
def pinned(values: Sequence[tuple[Any, Any]], others: Iterable[Any], *, reads: bool = False) -> Iterator[Any]:
    """Override the values of Keras variables and discard assignments to them.

    With several workers, read-modify-write updates of a counter would be lost. Values derived from such a counter are
    instead functions of the step's own number.

    Args:
        values: pairs of a Keras variable and a tensor.
        others: Keras variables whose assignments in the context are kept.
        reads: whether regularizers are called in the context.
    """
    with _Scope(values, reads=reads) as scope:
        yield scope
    for variable in others:
        value = scope.assigned(variable)
        if value is not None:
            variable.assign(value)


class AsynchronousStep:
    """Dispatches each batch to a worker, which updates the parameters immediately.

    A step's gradient is that of its whole batch. When it is applied, other workers have updated the parameters since
    they were read: with n workers by up to n - 1 steps, or more if they are faster. Learning rate, optimizer
    corrections and dropout are functions of the step's number. A measured step waits for all steps before it, and for
    itself.

    Args:
        workers: take the steps.
        logs: the results of the model's `train_step`.
    """

    def __init__(
        self,
        backend: Backend,
        workers: Workers,
        state: TrainState,
        passes: ForwardBackward,
        logs: StepLogs,
        rule: UpdateRule,
    ) -> None:
        self._backend = backend
        self._workers = workers
        self._state = state
        self._forward_backward = passes
        self._logs = logs
        self._rule = rule
        self._ahead = 0
        """Steps since the last one waited for."""
        self._epoch = Tally(logs)
        self._recent = Tally(logs)
        """Metrics since the last logged step."""
        self._functions: dict[tuple[bool, bool | None], Callable[..., Any]] = {}

    def __call__(self, batch: Batch, *, measure: bool) -> StepResult:
        """Dispatch `batch` to a worker; `measure` waits and returns `Measured`."""
        if measure:
            self._workers.join()
        inputs, targets, weights = batch[:3]
        parts = (inputs, targets) if weights is None else (inputs, targets, weights)
        later = self._workers.schedule(self._function(measure, batch.finite), parts, tf.constant(self._ahead, tf.int64))
        self._ahead += 1
        self._epoch.add(later)
        self._recent.add(later)
        return StepResult(_TotalsOf(later), self._measured(later.fetch()) if measure else None)

    def begin_metrics(self, sums: Mapping[str, list[Any]] | None = None) -> None:
        """Reset the epoch's metrics, or restore `sums`."""
        self._epoch.reset()
        self._epoch.restore_sums(sums or {})
        self._recent.reset()

    def metric_sums(self) -> dict[str, list[Any]]:
        """Return the state of each metric of the epoch."""
        return self._epoch.sums()

    def recent_metrics(self) -> dict[str, Value]:
        """Return the results since the last call."""
        results = self._recent.results()
        self._recent.reset()
        return results

    def metrics_so_far(self) -> dict[str, Value]:
        """Return the results of the epoch so far."""
        return self._epoch.results()

    def epoch_metrics(self) -> dict[str, Value]:
        """Return the metrics of the epoch, and reset them."""
        results = self.metrics_so_far()
        self.begin_metrics()
        return results

    def _function(self, measure: bool, finite: bool | None) -> Callable[..., Any]:
        def run(parts: tuple[Any, ...], ahead: tf.Tensor) -> Any:
            samples = tf.shape(tf.nest.flatten(parts)[0])[0]
            return self._backend.run(self._step, as_batch(parts, 1.0, samples, finite=finite), ahead, measure)

        key = (measure, finite)
        if key not in self._functions:
            self._functions[key] = tf.function(run, autograph=False, reduce_retracing=True)
        return self._functions[key]

    def _step(self, batch: Batch, ahead: tf.Tensor, measure: bool) -> dict[str, Any]:
        """Take the step on a worker and return its results."""
        optimizer = self._state.optimizer
        states: list[tf.Tensor] = []
        local = self._forward_backward(batch, within=lambda: self._drawing(ahead, states))
        with self._counting(ahead):
            rate = rate_of(optimizer)
            totals, norm = self._rule.update(local, measure=measure)
        found = {"totals": totals, "metrics": states}
        if measure:
            found["rate"], found["norm"] = rate, norm
            found["finite"] = zero_if_finite([v.read_value() for v in self._state.trainable.values()])
        return found

    @contextmanager
    def _drawing(self, ahead: tf.Tensor, states: list[tf.Tensor]) -> Iterator[None]:
        """Make random layers functions of (seed, step), and count the metrics of this step alone, in `states`."""
        model = self._state.model
        seeds = seed_states(model)
        drawn = {id(seed) for seed in seeds}
        generators = self._state.generator_states(0, self._state.counter + ahead).values() if seeds else ()
        counted = self._logs.keras_variables()
        empty = [(v, tf.zeros(v.shape, v.dtype)) for v in counted]
        others = [v for v in model.non_trainable_variables if id(v) not in drawn]
        with pinned([*zip(seeds, generators, strict=True), *empty], others, reads=True) as scope:
            yield
        states[:] = [tf.convert_to_tensor(scope.get_current_value(v)) for v in counted]

    def _counting(self, ahead: tf.Tensor) -> AbstractContextManager[None]:
        """Return a context with the optimizer's `iterations` before this step."""
        optimizer = self._state.optimizer
        count = optimizer.iterations
        at = tf.convert_to_tensor(count) + tf.cast(ahead, count.dtype)
        others = [v for v in [*self._state.model.trainable_variables, *optimizer.variables] if v is not count]
        return pinned([(count, at)], [v for v in others if isinstance(v, keras.Variable)])

    def _measured(self, found: dict[str, Any]) -> Measured:
        """Advance the counters to the completed steps, and return the measurements."""
        self._state.counter.assign_add(self._ahead)
        self._state.optimizer.iterations.assign_add(self._ahead)
        self._ahead = 0
        return Measured(
            learning_rate=found["rate"],
            grad_norm=found["norm"],
            loss_scale=None,
            finite=np.isfinite(found["finite"]),
        )


class _TotalsOf:
    """Totals of a pending step."""

    def __init__(self, later: Future) -> None:
        self._later = later

    def numpy(self) -> Any:
        return self._later.fetch()["totals"]
