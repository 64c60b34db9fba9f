"""Embeddings on servers, and an all-reduce for all other gradients (Parallax, Kim et al. 2019, arXiv:1808.02621).

All ranks take each step together. The rows of a table that a rank's samples touch travel to the table's server, which
adds up those of all ranks, updates once, and answers with the rows that have changed: what an all-reduce or a gathering
of rows sends to every rank, the server sends once. Nothing is stale, unless rows are pulled ahead, beside the next
step.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.tensorflow import eager_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.pipeline import TrainingData
from hvdtrain.gradients.reduction import Gradient, scaled
from hvdtrain.gradients.sparse import gather_rows
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.optim.averaging import averages_weights, innermost
from hvdtrain.optim.clipping import global_norm
from hvdtrain.optim.fused import fused_updates
from hvdtrain.runtime.logs import LOGGER
from hvdtrain.state.train_state import TrainState
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import CompiledStep, LocalGradients, Totals
from hvdtrain.training.update_rules.local_sgd import unique_rows
from hvdtrain.training.update_rules.servers.layout import owners_of
from hvdtrain.training.update_rules.servers.rule import AsyncUpdate


class HybridUpdate(AsyncUpdate):
    """Reduces dense gradients; pushes rows of tables to servers and pulls them.

    Raises ConfigError for an optimizer that keeps an EMA of weights or more counts than one, or if no variable belongs
    on a server.
    """

    name = "hybrid"
    waits_when_measured = False
    _divides = False

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        if averages_weights(optimizer):
            raise ConfigError(
                f"{opt('update', self.name)} keeps no averages of weights, of which servers have some: "
                "create the optimizer without use_ema."
            )
        super().__init__(backend, model, optimizer, options)
        advanced = self._masters.advanced_by_updates()
        if advanced:
            raise ConfigError(
                f"{opt('update', self.name)} does not go with {type(innermost(optimizer)).__name__}, which advances "
                f"{', '.join(advanced)} in each update: servers and ranks would both do so. Use Adam."
            )
        self._bound, self.divisors = 0, "exchanged"
        self._reducer = WeightedReducer(backend, self._options.reduction_on(backend))
        self._served: frozenset[str] = frozenset()

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Apply the mean of the dense gradients; keep the rows, to be pushed at the end of the step. Collective."""
        gradients = {path: each for path, each in zip(self._paths, local.gradients, strict=True) if each is not None}
        if not self._layouts:
            self._served = self._chosen(gradients)
        weight, expected = tf.cast(local.totals[1], tf.float64), tf.cast(local.expected_weight, tf.float64)
        factor = tf.math.divide_no_nan(expected, weight)
        pushed = {
            path: scaled(unique_rows(gradient), factor) for path, gradient in gradients.items() if path in self._served
        }
        self._weight.assign(weight)
        self._share.assign(tf.math.divide_no_nan(weight, expected))
        with eager_variables():
            self._lay_out(pushed)
        for layout, outgoing in zip(self._layouts, self._outbox, strict=True):
            outgoing.keep(layout, pushed)
        dense = [path for path in gradients if path not in self._served]
        means, totals = self._reducer.reduce(
            [gradients[path] for path in dense],
            local.totals,
            dense,
            weight_at=1,
            expected=local.expected_weight,
            uniform=local.uniform,
        )
        self._apply(dict(zip(dense, means, strict=True)))
        share = tf.math.divide_no_nan(weight, tf.cast(totals[1], tf.float64))
        return totals, self._global_norm(means, pushed, share) if measure else None

    def _apply(self, gradients: Mapping[str, Gradient]) -> None:
        """Update the variables that no server has, on all ranks alike."""
        masters, variables = self._masters.by_path, self._by_path()
        if not gradients:
            innermost(self.optimizer).iterations.assign_add(1)
            return
        with fused_updates(self.optimizer):
            self.optimizer.apply(list(gradients.values()), [masters[path] for path in gradients])
        for path in gradients:
            variables[path].assign(unwrap(masters[path]).read_value())

    def _note_step(self) -> None:
        """The update of dense gradients has counted it."""

    def _global_norm(self, means: Sequence[Gradient], pushed: Mapping[str, Gradient], share: tf.Tensor) -> tf.Tensor:
        """Return the norm of the whole gradient, for which rows are gathered. Collective."""
        rows = []
        for path, each in sorted(pushed.items()):
            mine = scaled(each, share)
            if isinstance(mine, tf.IndexedSlices):
                rows.append(gather_rows(mine, self._backend, f"hybrid/norm/{path}"))
            else:
                rows.append(self._backend.all_reduce(mine, name=f"hybrid/norm/{path}"))
        return global_norm([*means, *rows])

    def _chosen(self, gradients: Mapping[str, Gradient]) -> frozenset[str]:
        """Return the variables that belong on servers."""
        patterns = self._options.server_variables
        if patterns:
            names = {path: v.path for path, v in zip(self._paths, self._variables, strict=True) if path in gradients}
            unused = [each for each in patterns if not any(re.search(each, name) for name in names.values())]
            if unused:
                raise ConfigError(
                    f"{opt('server_variables', unused[0])} matches no variable of {type(self.model).__name__} that has "
                    f"a gradient. It has {', '.join(names.values())}."
                )
            return frozenset(path for path, name in names.items() if any(re.search(each, name) for each in patterns))
        sparse = {path: each for path, each in gradients.items() if isinstance(each, tf.IndexedSlices)}
        moved_by_rows = self._moved_by_rows(sparse)
        if not moved_by_rows and sparse.keys() - self._constrained():
            raise ConfigError(
                f"{opt('update', self.name)} gains nothing with {type(innermost(self.optimizer)).__name__}, which "
                "changes rows without a gradient too: whole tables would travel. Use SGD without momentum or Adagrad, "
                f"name variables in {opt('server_variables')}, or leave it out."
            )
        few = [path for path in moved_by_rows if self._touches_few(sparse[path])]
        # Of a batch that does not divide, one rank may have fewer rows than another.
        found = frozenset(few).intersection(*gather(self._backend, few))
        if not found:
            raise ConfigError(
                f"{opt('update', self.name)} puts tables on servers of which a step touches few rows, and "
                f"{type(self.model).__name__} has none: leave it out, or name variables in {opt('server_variables')}."
            )
        return found

    def _touches_few(self, rows: tf.IndexedSlices) -> bool:
        """Return whether the rows of all ranks together are fewer than the table's, as far as that is known."""
        count, whole = rows.indices.shape[0], rows.shape[0]
        return count is None or whole is None or count * self._backend.size < whole

    def _lay_out(self, gradients: Mapping[str, Gradient]) -> None:
        if not self._layouts:
            variables = self._by_path()
            sizes = {path: int(np.prod(variables[path].shape)) * variables[path].dtype.size for path in gradients}
            self._owners = owners_of(sizes, self._backend.size)
            if self._backend.primary:
                names = [v.path for path, v in zip(self._paths, self._variables, strict=True) if path in gradients]
                LOGGER.info(f"on servers: {', '.join(names)}; all other gradients are reduced")
            self._masters.divide(self._owners)
        super()._lay_out(gradients)

    def paced(self, step: CompiledStep, data: TrainingData, state: TrainState) -> tuple[Any, Any]:
        """Let the servers begin; all ranks take each step together. Collective."""
        super().paced(step, data, state)
        return step, data

    def reported(self, totals: tf.Tensor) -> Totals:
        """Return the totals, which are those of all ranks."""
        return totals

    def finite_parameters(self, state: TrainState) -> tf.Tensor:
        """Return whether all parameters are finite, in the compiled step."""
        return super(AsyncUpdate, self).finite_parameters(state)

    def _share_slots(self) -> None:
        """All ranks have the same of those that belong to no variable."""
