"""An optimizer's variables by role and by the structural path of the variable that they belong to."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.compat.keras_variables import OPTIMIZER_BOOKKEEPING, average_of, forget_slots, trained_variables
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.named_tensors import NamedTensor
from hvdtrain.state.placement import placed_tensor
from hvdtrain.state.structure import Structure
from hvdtrain.state.variables import own_attributes, unwrap


class Slot(NamedTuple):
    """A variable of an optimizer."""

    variable: tf.Variable
    owner: int | None
    """Place of the variable that it belongs to among those that the optimizer was built for; None: to all of them."""


def slot_tensors(optimizer: Any, variables: Sequence[Any], paths: Sequence[str]) -> dict[str, Slot]:
    """Return the variables of a built `optimizer` by role and path, such as `velocities/layers/0/kernel`.

    Those that belong to no variable of the model are named by their role alone: `iterations`, `learning_rate`. Within a
    LossScaleOptimizer the paths begin with `inner_optimizer/`. The order is that of `optimizer.variables`.

    Args:
        optimizer: a Keras optimizer, possibly around another one.
        variables: the variables that it was built for, in their order: the model's, or substitutes such as slices.
        paths: the structural paths of the model's variables that they stand for.
    """
    places = {variable.path: place for place, variable in enumerate(variables) if hasattr(variable, "path")}
    found: dict[int, tuple[str, int | None]] = {}
    for role, owner, variable in _attributes(optimizer, len(paths), places):
        found.setdefault(id(unwrap(variable)), (role, owner))
    named: dict[str, Slot] = {}
    for place, variable in enumerate(optimizer.variables):
        tensor = unwrap(variable)
        role, owner = found.get(id(tensor), (f"variables/{place}", None))
        named[role if owner is None else f"{role}/{paths[owner]}"] = Slot(tensor, owner)
    return named


def replicated_slots(optimizer: Any, structure: Structure, prefix: str = "optimizer") -> dict[str, NamedTensor]:
    """Return the variables of a built `optimizer` of the model's own variables, which every replica holds alike."""
    variables = trained_variables(innermost(optimizer))
    slots = slot_tensors(optimizer, variables, [structure.path(variable) for variable in variables])
    return {
        f"{prefix}/{path}": placed_tensor(slot.variable, None if slot.owner is None else variables[slot.owner])
        for path, slot in slots.items()
    }


def extend_optimizer(optimizer: Any, variables: Sequence[Any], structure: Structure) -> None:
    """Build a built `optimizer` again, for `variables` and then those that it knows besides, whose slots keep values.

    Nothing changes where it knows all of them.

    The new slots begin as at the first step, and averages of weights as the weights are. The order is that of an
    optimizer that was built for the same variables at first: Keras' own files depend on it.

    Args:
        optimizer: possibly around another one.
        variables: those that are trained by now.
        structure: of the model that they are in.
    """
    known = trained_variables(innermost(optimizer))
    new = unknown_to(optimizer, variables)
    if not new:
        return
    before = replicated_slots(optimizer, structure)
    trained = {id(variable) for variable in variables}
    everything = [*variables, *(variable for variable in known if id(variable) not in trained)]
    for each in _chain(optimizer):
        forget_slots(each)
    optimizer.build(everything)
    for path, tensor in replicated_slots(optimizer, structure).items():
        if path in before:
            tensor.value.assign(before[path].value)
    inner = innermost(optimizer)
    for variable in new if inner.use_ema else []:
        average = average_of(inner, variable)
        if average is not None:
            average.assign(variable)


def _chain(optimizer: Any) -> Iterator[Any]:
    """Yield `optimizer` and those that it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def unknown_to(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return those of `variables` that a built `optimizer` has no slots for."""
    known = {id(variable) for variable in trained_variables(innermost(optimizer))}
    return [variable for variable in variables if id(variable) not in known]


def _attributes(optimizer: Any, count: int, places: Mapping[str, int]) -> Iterator[tuple[str, int | None, Any]]:
    """Yield every variable that an attribute of `optimizer` holds, with its role and the place of its owner.

    Args:
        optimizer: see `slot_tensors`.
        count: of the variables that it was built for.
        places: those variables' places by their path.
    """
    for name, value in own_attributes(optimizer, OPTIMIZER_BOOKKEEPING):
        role = name.lstrip("_")
        if isinstance(value, keras.Variable):
            yield role, None, value
        elif isinstance(value, keras.optimizers.Optimizer):
            for inner, owner, slot in _attributes(value, count, places):
                yield f"{role}/{inner}", owner, slot
        elif isinstance(value, list | tuple | dict):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, slot in pairs:
                if isinstance(slot, keras.Variable):
                    owner = _owner(key, value, count, places)
                    yield role if owner is not None else f"{role}/{key}", owner, slot


def _owner(key: Any, slots: Any, count: int, places: Mapping[str, int]) -> int | None:
    """Return whose slot is at `key`: a dict has paths for keys, and a list one slot for each variable."""
    if isinstance(slots, dict):
        return places.get(key)
    return int(key) if len(slots) == count else None
