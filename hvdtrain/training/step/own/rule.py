"""The optimizers of a model's own step, as an update rule: the step itself applies gradients."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.compat.keras_variables import average_of, trained_variables
from hvdtrain.optim.averaging import has_averages, innermost, replaced_weights
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.optimizers import MAIN
from hvdtrain.state.slots import replicated_slots
from hvdtrain.state.structure import structure_of
from hvdtrain.training.update_rules.base import UpdateRule


class OwnStepUpdate(UpdateRule):
    """Owns the slots of a model's optimizers, under `optimizer/` and, of others, `optimizers/PATH/`.

    An optimizer that the step does not use, such as the one that `compile()` makes where it is given none, has none.

    Args:
        backend: the replicas.
        model: the built model.
        optimizers: its optimizers by path.
    """

    def __init__(self, backend: Backend, model: Any, optimizers: Mapping[str, Any]) -> None:
        self._optimizers = optimizers
        super().__init__(backend, model, optimizers.get(MAIN, next(iter(optimizers.values()))))

    def named_tensors(self) -> dict[str, NamedTensor]:
        """See `UpdateRule`."""
        structure = structure_of(self.model)
        tensors: dict[str, NamedTensor] = {}
        for path, optimizer in self._optimizers.items():
            if optimizer.built:
                prefix = MAIN if path == MAIN else f"optimizers/{path}"
                tensors |= replicated_slots(optimizer, structure, prefix)
        return tensors

    def averaged_weights(self) -> AbstractContextManager[None]:
        """See `UpdateRule`: the averages of each optimizer, of the weights that it trains."""
        return self._averages()

    @contextmanager
    def _averages(self) -> Iterator[None]:
        pairs = [pair for optimizer in self._optimizers.values() for pair in _averages_of(optimizer)]
        with replaced_weights([(variable, average) for variable, average in pairs if average is not None]):
            yield

    def _build_optimizer(self) -> None:
        """Build the only optimizer for all that is trained; of several each is built where the step first uses it."""
        if MAIN in self._optimizers and (len(self._optimizers) == 1 or self._optimizers[MAIN].built):
            super()._build_optimizer()


def _averages_of(optimizer: Any) -> list[tuple[Any, Any]]:
    if not has_averages(optimizer):
        return []
    inner = innermost(optimizer)
    return [(variable, average_of(inner, variable)) for variable in trained_variables(inner)]
