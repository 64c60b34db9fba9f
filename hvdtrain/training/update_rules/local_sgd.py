"""Local SGD: several local optimizer steps between averages of the weights.

Stich 2019 (arXiv:1805.09767). There is no communication between two averages. A replica is weighted by the samples it
trained on since the last average, so that one local step of plain SGD equals a step of data parallelism: sum(W_i (w -
lr g_i)) / sum(W_i) = w - lr sum(W_i g_i) / sum(W_i), where g_i is the mean gradient of replica i's samples and W_i
their weight. A replica without samples in a step, or with weights of 0 alone, takes no step: it waits.

With `options.local_after` the first steps are data parallel: post-local SGD (Lin et al. 2018, arXiv:1808.07217). An
outer optimizer may take the average's place; `streaming.py` averages in fragments, beside the steps.

Outer optimizers move the weights by the difference between two averages. x are the weights after the last outer step,
m the replicas' mean after the local steps since, gamma the learning rate of the last local step.

- `slowmo` (Wang et al. 2019, arXiv:1910.00643, algorithm 1), with the slow learning rate alpha and momentum beta:
  u <- beta u + (x - m) / gamma, x <- x - alpha gamma u. With alpha 1 and beta 0 it is the average. Where gamma is 0,
  (x - m) moves x, and does not enter u.
- `average`: x <- m.
- `diloco` (Douillard et al. 2023, arXiv:2311.08105): SGD with Nesterov's momentum mu and learning rate eta on x - m:
  u <- mu u + (x - m), x <- x - eta (x - m + mu u).
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import average_of, step_counter, trained_variables
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.gradients.sparse import gather_rows, sum_duplicates
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.fused import fused_updates
from hvdtrain.runtime.compiled import run_once
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.state.optimizers import rate_of, slot_tensors
from hvdtrain.state.structure import structure_of
from hvdtrain.state.train_state import RULE
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import LocalGradients, Totals
from hvdtrain.training.step.loss_terms import NO_WEIGHT
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.split_model import SplitModel

RATES = {"average": 1.0, "slowmo": 1.0, "diloco": 0.7}
MOMENTA = {"average": 0.0, "slowmo": 0.7, "diloco": 0.9}
_PLACE = f"{RULE}outer_momentum/"


class LocalUpdate(UpdateRule):
    """`options.local_steps` local optimizer steps, then an average of the weights.

    Clipping acts on each replica's own gradient, and the reported norm is the mean of the replicas' norms. The
    optimizer state stays local, or with `options.average_slots` is averaged along with the weights. Consolidating
    averages both in any case: a checkpoint holds one state, from which any number of replicas can resume. Raises
    ConfigError: an optimizer with dynamic loss scaling, whose scales would differ between averages.
    """

    weights_agree = False
    divisors = "weights"

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        super().__init__(backend, model, optimizer, options)
        self._options = options = options or StepOptions()
        self._period = options.local_steps or 1
        self._after = options.local_after
        self._average_slots = options.average_slots
        self._outer = None if options.outer_optimizer == "average" else OuterOptimizer(options)
        self._rate = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="local_rate")
        """Learning rate of the last local step; the optimizer has the next one's."""
        self._name_tensors()
        self._consolidated = True
        self._weight = tf.Variable(0.0, trainable=False, dtype=tf.float64, name="local_weight")
        """Weight of this replica's samples since the last average."""
        self._steps = tf.Variable(0, trainable=False, dtype=tf.int64, name="local_steps")
        self._unread = LocalTotals(backend)

    def follow_model(self, *, training: bool = True) -> None:
        """Also update the tensors to average."""
        super().follow_model(training=training)
        self._name_tensors()

    def _name_tensors(self) -> None:
        """Find the tensors that differ between averages: trained weights and optimizer state."""
        self._split = SplitModel(self._backend, self._variables)
        structure = structure_of(self.model)
        self._weights = structure.by_path(self._variables)
        self._alike = self._split.replicated.among(self._paths)
        known = trained_variables(innermost(self.optimizer))
        slots = slot_tensors(self.optimizer, known, [structure.path(variable) for variable in known])
        self._slots = {path: slot.variable for path, slot in slots.items() if slot.owner is not None}
        self._averaged = {**self._weights, **(self._slots if self._average_slots else {})}
        if self._outer is not None:
            self._outer.follow(self._weights)

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Also return the outer optimizer's momentum."""
        return {**super().named_tensors(), **({} if self._outer is None else self._outer.named_tensors())}

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Apply this replica's mean gradient; average the weights every `local_steps` steps."""
        factor = tf.math.divide_no_nan(tf.cast(local.expected_weight, tf.float64), tf.cast(local.totals[1], tf.float64))
        whole = self._split.summed(local.gradients, self._paths)
        own = [scaled(unique_rows(gradient), factor) for gradient in whole]
        own = self._split.replicated.agreed(own, self._paths, measure=False)
        early = tf.constant(False)
        if self._after:
            taken = tf.cast(innermost(self.optimizer).iterations, tf.int64)
            early = taken < self._after
            known = {path: gradient for path, gradient in zip(self._paths, own, strict=True) if gradient is not None}
            chosen = tf.cond(early, lambda: self._together(known, local.totals[1]), lambda: known)
            own = [chosen.get(path) for path in self._paths]
            tf.cond(tf.equal(taken, self._after), self._begin_local_steps, lambda: tf.constant(False))
        norm = self._split.norm(own) if measure or self._clipping.norm is not None else None
        own, norm = self._clipped(own, norm)
        self._rate.assign(tf.cast(rate_of(self.optimizer), tf.float64))
        tf.cond(early | (local.totals[1] > NO_WEIGHT), lambda: self._apply(own), self._wait)
        self._average_if_due(tf.cast(local.totals[1], tf.float64), early)
        if measure and norm is not None:
            norm = self._backend.all_reduce(norm, name="gradient//norm", op="average")
        return local.totals, norm if measure else None

    def _apply(self, gradients: list[Gradient]) -> tf.Tensor:
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._variables)
        return tf.constant(True)

    def _wait(self) -> tf.Tensor:
        """Count a step without samples, which momentum, moments, decay and EMA would take all the same.

        After a first step Keras' average is of its weights, and no longer of zeros; so it is here.
        """
        inner = innermost(self.optimizer)
        if inner.use_ema:
            tf.cond(tf.equal(inner.iterations, 0), partial(self._begin_averages, inner), lambda: tf.constant(False))
        for each in (
            inner,
            *getattr(inner, "optimizers", ()),
        ):  # of an optimizer of several, whose schedules go on, too
            step_counter(each).assign_add(1)
        return tf.constant(False)

    def _begin_averages(self, optimizer: Any) -> tf.Tensor:
        for variable in self._variables:
            average = average_of(optimizer, variable)
            if average is not None:
                average.assign(variable)
        return tf.constant(True)

    def _average_if_due(self, weight: tf.Tensor, early: tf.Tensor) -> None:
        """Count a step with samples of this `weight`; average at the end of a period, unless it is an early step."""
        self._weight.assign_add(weight)
        due = (self._steps.assign_add(1) >= self._period) & ~early
        tf.cond(due, lambda: self._average(self._averaged), lambda: tf.constant(False))

    def _together(self, gradients: Mapping[str, Any], weight: tf.Tensor) -> dict[str, Any]:
        """Return the mean of the replicas' gradients, weighted by their samples. Collective."""
        total = self._backend.all_reduce(tf.cast(weight, tf.float64), name="local_sgd//early_weight")
        share = tf.math.divide_no_nan(tf.cast(weight, tf.float64), total)

        def mean(gradient: Any, name: str) -> Any:
            if isinstance(gradient, tf.IndexedSlices):
                return gather_rows(gradient, self._backend, name)
            return self._backend.all_reduce(gradient, name=name)

        return {path: mean(scaled(each, share), f"local_sgd/early/{path}") for path, each in gradients.items()}

    def _begin_local_steps(self) -> tf.Tensor:
        self._weight.assign(0.0)
        self._steps.assign(0)
        if self._outer is not None:
            self._outer.begin()
        return tf.constant(True)

    def sync_from_model(self) -> None:
        """Let the outer optimizer begin at weights that all replicas share."""
        if self._outer is not None and self._consolidated:
            self._outer.begin()

    def on_state_loaded(self, own: Mapping[str, np.ndarray] | None = None) -> None:
        """Load the outer optimizer's momentum, and begin a new period."""
        if self._outer is not None and own is not None:
            self._outer.load(own)
        self._consolidated = True
        self._begin_local_steps()

    def reported(self, totals: tf.Tensor) -> Totals:
        """Return totals that are reduced when read."""
        self._consolidated = False
        return self._unread.add(totals)

    def consolidate(self) -> None:
        """Average weights, unless the last step did, and optimizer state. Collective."""
        if self._consolidated or self._backend.size == 1:
            return
        self._consolidated = True
        if int(innermost(self.optimizer).iterations) <= self._after:
            return  # no step was a local one
        differing = {**(self._weights if int(self._steps) else {}), **self._slots}
        run_once(lambda: self._backend.run(lambda: self._average(differing)))

    def _average(self, variables: dict[str, tf.Variable]) -> tf.Tensor:
        """Replace `variables` by their mean over the replicas, weighted by samples, or move them by it. Collective."""
        rate, weight = self._rate.read_value(), self._weight.read_value()
        total = self._backend.all_reduce(weight, name="local_sgd//weight")
        share = tf.where(total > 0, tf.math.divide_no_nan(weight, total), 1.0 / self._backend.size)
        for path, variable in variables.items():
            mine = at_least_float32(variable.read_value())
            mean = self._backend.all_reduce(mine * tf.cast(share, mine.dtype), name=f"local_sgd/{path}")
            if path in self._alike:  # reduced separately by each rank along tp, with its own rounding
                mean = self._backend.along("tp").all_reduce(mean, name=f"local_sgd/alike/{path}", op="average")
            if self._outer is not None and path in self._weights:
                mean = self._outer.step(path, mean, rate)
            variable.assign(tf.cast(mean, variable.dtype))
        self._weight.assign(0.0)
        self._steps.assign(0)
        return tf.constant(True)


class LocalTotals:
    """Local totals of steps, [3] or of several [steps, 3], reduced in one exchange when some are read.

    Every replica reads at the same steps, as the loop does.
    """

    def __init__(self, backend: Backend) -> None:
        self._waiting: list[_Rows] = []
        self._sum: Callable[[tf.Tensor], tf.Tensor] = tf.function(
            lambda rows: backend.run(lambda: backend.all_reduce(rows, name="local_sgd//totals")),
            autograph=False,
            input_signature=[tf.TensorSpec([None, 3], tf.float32)],
        )

    def add(self, totals: tf.Tensor) -> Totals:
        """Return the totals over all replicas, to be read later."""
        rows = _Rows(self, totals)
        self._waiting.append(rows)
        return rows

    def reduce(self) -> None:
        """Reduce all that are waiting. Collective."""
        waiting, self._waiting = self._waiting, []
        local = [tf.reshape(tf.cast(rows.local, tf.float32), [-1, 3]) for rows in waiting]
        sums = np.split(self._sum(tf.concat(local, 0)).numpy(), np.cumsum([len(each) for each in local])[:-1])
        for rows, values in zip(waiting, sums, strict=True):
            rows.values = values.reshape(tuple(rows.local.shape))


class _Rows:
    """Totals of steps."""

    def __init__(self, unread: LocalTotals, local: tf.Tensor) -> None:
        self._unread = unread
        self.local = local
        self.values: np.ndarray | None = None

    def numpy(self) -> Any:
        if self.values is None:
            self._unread.reduce()
        return self.values


def unique_rows(gradient: Gradient) -> Gradient:
    """Sum sparse rows with the same index: Keras' adaptive optimizers are wrong on duplicates."""
    return sum_duplicates(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


class OuterOptimizer:
    """The outer optimizer that `options.outer_optimizer` names, with its momentum and the weights of its last step."""

    def __init__(self, options: StepOptions) -> None:
        self._name = options.outer_optimizer
        given = options.outer_learning_rate, options.outer_momentum
        self._rate = RATES[self._name] if given[0] is None else given[0]
        self._momentum = MOMENTA[self._name] if given[1] is None else given[1]
        self._weights: Mapping[str, tf.Variable] = {}
        self._anchors: dict[str, tf.Variable] = {}
        self._momenta: dict[str, tf.Variable] = {}

    def follow(self, weights: Mapping[str, tf.Variable]) -> None:
        """Move `weights`, by path; what is known of them stays."""
        self._weights = weights
        for path in weights.keys() - self._anchors.keys():
            value = at_least_float32(weights[path].read_value())
            self._anchors[path] = tf.Variable(value, trainable=False, name="outer_anchor")
            if self._name != "average":
                self._momenta[path] = tf.Variable(tf.zeros_like(value), trainable=False, name="outer_momentum")

    def anchor(self, path: str) -> tf.Tensor:
        """Return the weights at `path` after their last outer step."""
        return self._anchors[path].read_value()

    def begin(self) -> None:
        """Begin at the present weights, on which all replicas agree."""
        for path, variable in self._weights.items():
            self._anchors[path].assign(at_least_float32(variable.read_value()))

    def step(self, path: str, mean: tf.Tensor, local_rate: tf.Tensor) -> tf.Tensor:
        """Return the weights that follow the replicas' `mean` of those at `path`."""
        anchor = self._anchors[path]
        if self._name == "average":
            anchor.assign(mean)
            return mean
        momentum = self._momenta[path]
        before, moved = anchor.read_value(), anchor.read_value() - mean
        if self._name == "slowmo":
            local_rate = tf.cast(local_rate, mean.dtype)
            kept = self._momentum * momentum.read_value()
            velocity = kept + tf.math.divide_no_nan(moved, local_rate)
            after = before - self._rate * (local_rate * kept + moved)
        else:
            velocity = self._momentum * momentum.read_value() + moved
            after = before - self._rate * (moved + self._momentum * velocity)
        momentum.assign(velocity)
        anchor.assign(after)
        return after

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the momentum, by path."""
        held = [path for path in self._weights if path in self._momenta]
        return {f"{_PLACE}{path}": replicated_tensor(self._momenta[path]) for path in held}

    def load(self, tensors: Mapping[str, np.ndarray]) -> None:
        """Take up the momentum of a checkpoint; 0 where it has none, as of a run by another rule."""
        for path, momentum in self._momenta.items():
            momentum.assign(tensors.get(f"{_PLACE.removeprefix(RULE)}{path}", np.zeros(momentum.shape)))


def at_least_float32(value: Any) -> Any:
    """Return a tensor in 32 bits or more: in 16, the replicas' shares would not sum to 1."""
    return value if value.dtype.size >= 4 else tf.cast(value, tf.float32)
