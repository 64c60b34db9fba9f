"""ZeRO stage 3: sharded parameters, full only while a layer uses them.

Between two steps a replica holds a shard of each large variable, of its gradient and of its optimizer state. Parameters
are all-gathered just before a layer's forward, freed after it, and all-gathered again for its backward (`gathered.py`).
Code between two steps, such as a callback that reads weights, sees full variables: `gather_weights` gathers them, and
the next step frees them. A model built by a function is sharded from the start (`building.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.gradients.reduction import Gradient
from hvdtrain.optim.averaging import has_averages
from hvdtrain.optim.fused import fused_updates
from hvdtrain.runtime.compiled import run_once
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.train_state import MODEL, TrainState
from hvdtrain.state.variables import unwrap
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.contract import Parameters
from hvdtrain.training.step.finite import poison_of
from hvdtrain.training.update_rules.zero.building import gather_initial
from hvdtrain.training.update_rules.zero.gathered import GatheredParameters, gathered_forward
from hvdtrain.training.update_rules.zero.initial_slice import initial_slice_of
from hvdtrain.training.update_rules.zero.stage2 import ScatteredGradientsUpdate
from hvdtrain.training.update_rules.zero.window import window_for


class ShardedParametersUpdate(ScatteredGradientsUpdate):
    """Sharded parameters, gradients and optimizer state."""

    _stage = 3

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        self._prefetch = (options or StepOptions()).zero_prefetch
        self._shown = True
        """Whether the model's variables are full."""
        super().__init__(backend, model, optimizer, options)
        self._begin_released()

    def gathering(self) -> AbstractContextManager[None] | None:
        """Gather each parameter on read, unless full."""
        return None if self._shown else gathered_forward(self._backend, self._by_path, self._prefetch)

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """Return gathered parameters."""
        return GatheredParameters(
            trainable, self._backend, self._by_path, prefetch=self._prefetch, guarded=self.guard is not None
        )

    def finite_parameters(self, state: TrainState) -> tf.Tensor:
        """Check the shards of all replicas. Collective."""
        mine = tf.add_n([poison_of(variable.read_value()) for variable in self.parameters(state.trainable).sources()])
        return tf.math.is_finite(self._backend.all_reduce(mine, name="parameters//finite"))

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Free the full variables before the step."""
        self._release()
        yield

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Also return the parameters' shards, unless full."""
        tensors = super().named_tensors()
        if not self._shown:
            for path, shard in self._by_path.items():
                tensors[f"{MODEL}{path}"] = shard.named_tensor(unwrap(shard.master))
        return tensors

    def sync_from_model(self) -> None:
        """Copy full variables into the masters; freed ones cannot have changed."""
        for shard in self._by_path.values() if self._shown else ():
            shard.fill_master_apart()

    def gather_weights(self) -> None:
        """All-gather all parameters. Collective."""
        if self._shown:
            return

        def gather_all() -> None:
            # All at once would need memory for a second copy of the model.
            window = window_for(self._by_path.values())
            for path, shard in self._by_path.items():
                with tf.control_dependencies(window.before(shard.bytes)):
                    mine = shard.master.value.read_value()
                window.add(shard.bytes, shard.fill(self._whole_of(path, mine, f"zero_show/{path}")))

        run_once(lambda: self._backend.run(gather_all))
        for shard in self._by_path.values():
            shard.reveal()
        self._shown = True

    def consolidate(self) -> None:
        """All-gather parameters and averages. Collective."""
        self.gather_weights()
        super().consolidate()

    def prepare_to_evaluate(self) -> None:
        """Gather only averages: evaluation gathers weights layer by layer. Collective."""
        if has_averages(self.optimizer):
            self.consolidate()

    def prepare_to_save(self) -> None:
        """Free the full variables: each replica saves its shards."""
        self._release()

    def _apply(self, gradients: Sequence[Gradient]) -> None:
        """Update the shards; the next forward pass gathers them."""
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._targets)

    def _begin_released(self) -> None:
        """Start with the shards kept from building the model, if any."""
        left = [found for v in self.model.variables if (found := initial_slice_of(v)) is not None]
        for number, initial in enumerate(left):  # of layers that were frozen since
            gather_initial(initial, self._backend, f"zero_initial/whole/{number}")
        shards = self._by_path.values()
        if any(shard.begins_released for shard in shards):
            for shard in shards:
                if not shard.begins_released:
                    shard.fill_master_apart()
            self._release()

    def _release(self) -> None:
        if self._shown:
            for shard in self._by_path.values():
                shard.release()
        self._shown = False
