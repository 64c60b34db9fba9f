"""ZeRO stage 1: sharded optimizer state.

A step reduce-scatters the gradient, the optimizer updates a master copy of each replica's shard, and an all-gather
restores the full variable. That moves as many bytes as an all-reduce, and divides the work of the update and the memory
of the state by the number of replicas. Small variables are all-reduced and updated in full everywhere: their messages
cost the same, their state next to nothing.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import average_of, is_decayed, set_decayed
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.gradients.reduction import Gradient, ReductionOptions
from hvdtrain.gradients.weighted_reduction import WeightedReducer
from hvdtrain.optim.averaging import has_averages, innermost, replaced_weights
from hvdtrain.optim.fused import fused_updates
from hvdtrain.optim.precision import has_dynamic_scale
from hvdtrain.runtime.placement import placement_of
from hvdtrain.state.lent_optimizer import LentOptimizer
from hvdtrain.state.named_tensors import NamedTensor, placed_tensor
from hvdtrain.state.optimizers import slot_tensors
from hvdtrain.state.structure import structure_of
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import LocalGradients
from hvdtrain.training.update_rules.base import UpdateRule
from hvdtrain.training.update_rules.split_model import SplitModel, overflowing_together
from hvdtrain.training.update_rules.zero.reducer import OF_SUMS, ScatterReducer
from hvdtrain.training.update_rules.zero.shards import Shard, stays_whole
from hvdtrain.training.update_rules.zero.window import has_lean_update, slice_updates


class ZeroUpdate(UpdateRule):
    """Sharded optimizer state and update.

    Raises ConfigError for an optimizer that needs full variables, or already has slots for them.
    """

    _stage = 1

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        refuse_slots(optimizer, opt("zero"))
        self._split = SplitModel(backend, model.trainable_variables)
        path_of = structure_of(model).path
        shared = {id(v): self._split.replicas_of(v) for v in model.trainable_variables if not stays_whole(v)}
        self._shards = {
            id(v): Shard(v, shared[id(v)], path_of(v))
            for v in model.trainable_variables
            # An expert on a single rank cannot be sharded further.
            if id(v) in shared and (shared[id(v)].size > 1 or placement_of(v) is None)
        }
        self._targets = [self._shards[id(v)].master if id(v) in self._shards else v for v in model.trainable_variables]
        self._by_path = {shard.path: shard for shard in self._shards.values()}
        self._averages: list[tuple[Any, tf.Tensor]] = []
        self._lent = LentOptimizer(optimizer, opt("zero", self._stage))
        super().__init__(backend, model, optimizer, options)
        op = (options or StepOptions()).reduce_op
        others = self._split.reducer(OF_SUMS, self._paths)
        reducer = ScatterReducer(backend, self._by_path, scattered=self._scattered_in_passes(), others=others)
        self._reducer = WeightedReducer(backend, ReductionOptions(op), reducer)

    def update(self, local: LocalGradients, *, measure: bool) -> tuple[tf.Tensor, tf.Tensor | None]:
        """Reduce-scatter the gradients, update this replica's shards, and all-gather. Collective."""
        gradients, totals = self._reducer.reduce(
            self._split.summed(local.gradients, self._paths),
            local.totals,
            self._paths,
            weight_at=1,
            expected=local.expected_weight,
            uniform=local.uniform,
        )
        gradients = self._split.replicated.agreed(gradients, self._paths, measure=measure)
        scales = has_dynamic_scale(self.optimizer)
        sliced = [self._shards.get(id(variable)) is not None for variable in self._variables]
        norm = self._split.norm(gradients, sliced) if measure or scales or self._clipping.norm is not None else None
        if scales:
            gradients = overflowing_together(gradients, norm)
        if self.guard is not None:
            totals = self._split.agreed(totals)
        gradients, norm = self._clipped(gradients, norm)

        return self._unless_bad(totals, lambda: self._apply(gradients)), norm

    def diverging_gradients(self) -> dict[str, float]:
        """Return the deviations along tp."""
        return self._split.replicated.diverging_gradients(self._paths, self.model)

    def _scattered_in_passes(self) -> frozenset[str]:
        """Return the paths whose gradients are already sharded after the passes."""
        return frozenset()

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the optimizer state, sharded for sharded variables."""
        self._take_back()
        tensors = {}
        for path, (slot, owner) in slot_tensors(self.optimizer, self._targets, self._paths).items():
            variable = None if owner is None else self._variables[owner]
            shard = self._shards.get(id(variable))
            tensors[f"optimizer/{path}"] = placed_tensor(slot, variable) if shard is None else shard.named_tensor(slot)
        return tensors

    def follow_model(self, *, training: bool = True) -> None:
        """Reject training after layers were (un)frozen. Raises ConfigError if the trained variables have changed."""
        if training:
            refuse_frozen(self._variables, self.model, opt("zero"))
            self._take_back()

    def give_back(self, *, whole: bool) -> None:
        """Let the optimizer be the model's, with slots that are all-gathered if `whole`. Collective."""
        if self._lent.given_back:
            return

        def gathered() -> dict[str, tf.Tensor]:
            return {
                path: slot.read_value() if shard is None else self._whole_of(shard.path, slot, f"zero_slot/{path}")
                for path, slot, shard in self._slots()
            }

        gather = tf.function(lambda: self._backend.run(gathered), autograph=False)
        self._lent.give_back(self.model, gather.get_concrete_function()() if whole else None)

    def _take_back(self) -> None:
        """Train with the optimizer again, and cut what its slots have become meanwhile."""
        wholes = self._lent.take_back(self.model)
        for path, slot, shard in self._slots() if wholes else ():
            if path in wholes:
                slot.assign(wholes[path] if shard is None else shard.cut(wholes[path]))

    def _slots(self) -> list[tuple[str, tf.Variable, Shard | None]]:
        """Return the optimizer's variables by path, with the shard of the variable that each is for."""
        found = slot_tensors(self.optimizer, self._targets, self._paths).items()
        return [
            (path, slot, None if owner is None else self._shards.get(id(self._variables[owner])))
            for path, (slot, owner) in found
        ]

    def consolidate(self) -> None:
        """All-gather the EMA of the weights, if any. Collective."""
        if not has_averages(self.optimizer):
            return
        inner = innermost(self.optimizer)
        if self._lent.given_back:
            held = [(variable, average_of(inner, variable)) for variable in self._variables]
            self._averages = [(variable, tf.identity(average)) for variable, average in held if average is not None]
            return
        averages = {path: average_of(inner, target) for path, target in zip(self._paths, self._targets, strict=True)}

        def gathered() -> dict[str, tf.Tensor]:
            return {
                path: self._whole_of(path, tf.convert_to_tensor(average), f"zero_average/{path}")
                for path, average in averages.items()
                if average is not None
            }

        wholes = tf.function(lambda: self._backend.run(gathered), autograph=False).get_concrete_function()()
        named = dict(zip(self._paths, self._variables, strict=True))
        self._averages = [(named[path], value) for path, value in wholes.items()]

    def reported(self, totals: tf.Tensor) -> tf.Tensor:
        """Discard gathered averages: training continues."""
        self._averages = []
        return totals

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Swap in the averages gathered by the last `consolidate`."""
        with replaced_weights(self._averages):
            yield

    def _build_optimizer(self) -> None:
        inner = innermost(self.optimizer)
        self.optimizer.build(self._targets)
        for shard in self._shards.values():
            # Keras passes the tf.Variable, whose name includes the layers' names.
            decays = is_decayed(inner, shard.variable) and is_decayed(inner, shard.master)
            set_decayed(inner, shard.master, decays)
        self._lent.keep_from_files()

    def _apply(self, gradients: Sequence[Gradient]) -> None:
        """Update this replica's shards and all-gather the full variables. Collective."""
        if has_lean_update(self.optimizer):
            with fused_updates(self.optimizer), slice_updates(self.optimizer, self._by_path.values(), self._all_gather):
                self.optimizer.apply(gradients, self._targets)
            return
        for shard in self._by_path.values():
            shard.fill_master()
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._targets)
        for path, gradient in zip(self._paths, gradients, strict=True):
            if path in self._by_path and gradient is not None:
                self._all_gather(self._by_path[path])

    def _all_gather(self, shard: Shard) -> Any:
        """All-gather an updated variable; return the last operation."""
        return shard.fill(self._whole_of(shard.path, shard.master.value.read_value(), f"zero/{shard.path}"))

    def _whole_of(self, path: str, mine: tf.Tensor, name: str) -> tf.Tensor:
        """All-gather shards of the shape of the variable `path`."""
        if path not in self._by_path:
            return mine
        shard = self._by_path[path]
        return tf.reshape(shard.exchange.all_gather(mine, name=name), shard.variable.shape)


def refuse_slots(optimizer: Any, option: str) -> None:
    """Reject an optimizer that has slots for whole variables. Raises ConfigError."""
    if optimizer.built:
        raise ConfigError(
            f"The optimizer {innermost(optimizer).name!r} has slots for whole variables already, and {option} keeps "
            "others: give a new optimizer, its name, or a function that builds one."
        )


def refuse_frozen(before: Sequence[Any], model: Any, option: str) -> None:
    """Reject training of other variables than `before`, for which slots were made. Raises ConfigError."""
    now = model.trainable_variables
    if {id(v) for v in before} != {id(v) for v in now}:
        raise ConfigError(
            f"Layers were frozen or unfrozen since the slots were made, and {option} keeps slices of them: "
            f"give a new Trainer a new optimizer. Received: {len(now)} trainable variables, {len(before)} before."
        )
