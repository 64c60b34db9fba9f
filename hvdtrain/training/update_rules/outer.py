"""Outer optimizers of local SGD: they move the weights by the difference between two averages.

x are the weights after the last outer step, m the replicas' mean after the local steps since, gamma the learning rate
of the local steps.

- `slowmo` (Wang et al. 2019, arXiv:1910.00643, algorithm 1), with the slow learning rate alpha and momentum beta:
  u <- beta u + (x - m) / gamma, x <- x - alpha gamma u. With alpha 1 and beta 0 it is the average.
- `average`: x <- m.
- `diloco` (Douillard et al. 2023, arXiv:2311.08105): SGD with Nesterov's momentum mu and learning rate eta on x - m:
  u <- mu u + (x - m), x <- x - eta (x - m + mu u).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.state.train_state import RULE
from hvdtrain.training.options import StepOptions

RATES = {"average": 1.0, "slowmo": 1.0, "diloco": 0.7}
MOMENTA = {"average": 0.0, "slowmo": 0.7, "diloco": 0.9}
_PLACE = f"{RULE}outer_momentum/"


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
            velocity = self._momentum * momentum.read_value() + tf.math.divide_no_nan(moved, local_rate)
            after = before - self._rate * local_rate * velocity
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
