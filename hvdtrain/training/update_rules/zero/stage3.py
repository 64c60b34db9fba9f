"""ZeRO stage 3: parameters too are slices, and whole only while a layer uses them.

Between two steps a replica holds a slice of each large variable, of its gradient and of its slots. The forward pass
gathers a layer's parameters where it reads them, and the backward pass gathers them again; see `gathered.py`. What is
between two steps, such as an evaluation or a callback that looks at weights, sees whole variables: `show_weights`
gathers them, and the next step gives their memory back. Of a model that a function builds, slices are all there is from
the start: see `building.py`.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
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
from hvdtrain.training.step.finite import poison_of
from hvdtrain.training.step.parameters import Parameters
from hvdtrain.training.update_rules.zero.building import make_whole
from hvdtrain.training.update_rules.zero.gathered import GatheredParameters, gathered_forward
from hvdtrain.training.update_rules.zero.initial_slice import initial_slice_of
from hvdtrain.training.update_rules.zero.stage2 import ScatteredGradientsUpdate
from hvdtrain.training.update_rules.zero.window import window_for


class ShardedParametersUpdate(ScatteredGradientsUpdate):
    """Sharded parameters, gradients and slots; see the module and `UpdateRule`."""

    _stage = 3
    _goes_with: tuple[str, ...] = ("cp", "ep", "tp")

    def __init__(self, backend: Backend, model: Any, optimizer: Any, options: StepOptions | None = None) -> None:
        self._prefetch = (options or StepOptions()).zero_prefetch
        self._shown = True
        """Whether the model's variables are whole."""
        super().__init__(backend, model, optimizer, options)
        self._begin_released()

    @property
    def holds_weights(self) -> bool:
        """See `UpdateRule`."""
        return self._shown

    def gathered_weights(self) -> AbstractContextManager[None]:
        """See `UpdateRule`."""
        return nullcontext() if self._shown else gathered_forward(self._backend, self._by_path, self._prefetch)

    def parameters(self, trainable: Mapping[str, tf.Variable]) -> Parameters:
        """See `UpdateRule`."""
        return GatheredParameters(
            trainable, self._backend, self._by_path, prefetch=self._prefetch, guarded=self.guard is not None
        )

    def finite_parameters(self, state: TrainState) -> tf.Tensor:
        """See `UpdateRule`."""
        mine = tf.add_n([poison_of(variable.read_value()) for variable in self.parameters(state.trainable).sources()])
        return tf.math.is_finite(self._backend.all_reduce(mine, name="parameters//finite"))

    def begin_step(self) -> None:
        """See `UpdateRule`: from here on the slices are all there is."""
        self._release()

    def named_tensors(self) -> dict[str, NamedTensor]:
        """See `UpdateRule`; while they are not whole, the sharded parameters too."""
        tensors = super().named_tensors()
        if not self._shown:
            for path, shard in self._by_path.items():
                tensors[f"{MODEL}{path}"] = shard.named_tensor(unwrap(shard.master))
        return tensors

    def adopt_weights(self) -> None:
        """See `UpdateRule`; weights that nobody could look at were not set either."""
        for shard in self._by_path.values() if self._shown else ():
            shard.fill_master_apart()

    def show_weights(self) -> None:
        """See `UpdateRule`."""
        if self._shown:
            return

        def gather_all() -> None:
            # All at once would take memory for a second copy of the model.
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
        """See `UpdateRule`."""
        self.show_weights()
        super().consolidate()

    def prepare_to_evaluate(self) -> None:
        """See `UpdateRule`: an evaluation gathers the weights layer by layer; averages of them are whole."""
        if has_averages(self.optimizer):
            self.consolidate()

    def prepare_to_save(self) -> None:
        """See `UpdateRule`: each replica saves its slices."""
        self._release()

    def _apply(self, gradients: Sequence[Gradient]) -> None:
        """Update the slices; the next forward pass gathers them."""
        with fused_updates(self.optimizer):
            self.optimizer.apply(gradients, self._targets)

    def _begin_released(self) -> None:
        """Begin with the slices that were kept as the model was built, if it was built so."""
        left = [found for v in self.model.variables if (found := initial_slice_of(v)) is not None]
        for number, initial in enumerate(left):  # of layers that were frozen since
            make_whole(initial, self._backend, f"zero_initial/whole/{number}")
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
