"""Optimizers of a model, and their state by role and by the structural path of the owning variable."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from hvdtrain.compat.keras_variables import (
    OPTIMIZER_BOOKKEEPING,
    average_of,
    forget_slots,
    step_counter,
    trained_variables,
)
from hvdtrain.optim.averaging import innermost
from hvdtrain.state.named_tensors import NamedTensor, placed_tensor
from hvdtrain.state.structure import Structure, children
from hvdtrain.state.variables import own_attributes, unwrap

MAIN = "optimizer"
"""Path of the optimizer set by `Model.compile`."""
AVERAGES = "/model_variables_moving_average/"
"""In the path of a slot of an optimizer with `use_ema`: what follows is the variable's."""


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return a model's and its layers' optimizers by path, `model.optimizer` first.

    Lists, tuples and dicts are searched: `d_optimizer`, `optimizers/0`, `critic/optimizer`. An optimizer in several
    attributes has the alphabetically first path; a wrapper stands for itself and its inner optimizer.
    """
    found: dict[str, Any] = {}
    main = getattr(model, MAIN, None)
    if isinstance(main, keras.optimizers.Optimizer):
        found[MAIN] = main
    _search(model, "", found, seen={})
    wrapped = {id(inner) for optimizer in found.values() for inner in list(chain_of(optimizer))[1:]}
    return {path: optimizer for path, optimizer in found.items() if id(optimizer) not in wrapped}


def _search(thing: Any, path: str, found: dict[str, Any], seen: dict[int, Any]) -> None:
    seen[id(thing)] = thing  # keeps the object alive, so that its id is not reused
    for name, child in children(thing):
        place = f"{path}/{name}" if path else name
        if isinstance(child, keras.optimizers.Optimizer):
            if all(child is not known for known in found.values()):
                found[place] = child
        elif isinstance(child, keras.Layer | list | tuple | dict) and id(child) not in seen:
            _search(child, place, found, seen)


class Slot(NamedTuple):
    """A variable of an optimizer."""

    variable: tf.Variable
    owner: int | None
    """Index of the owning variable among those the optimizer was built for; None: shared."""


def rate_of(optimizer: Any) -> tf.Tensor:
    """Return an optimizer's learning rate of now; of a MultiOptimizer, that of its first."""
    several = getattr(innermost(optimizer), "optimizers", None)
    return tf.convert_to_tensor((several[0] if several else optimizer).learning_rate)


def rate_at(optimizer: Any, step: tf.Tensor) -> tf.Tensor:
    """Return an optimizer's learning rate in `step`, from 0, by its schedule; without one that of now."""
    count = step_counter(optimizer)
    with keras.StatelessScope([(count, tf.cast(step, count.dtype))]):  # a schedule is given a Keras variable, as ever
        return rate_of(optimizer)


def chain_of(optimizer: Any) -> Iterator[Any]:
    """Yield `optimizer` and the ones it wraps."""
    while optimizer is not None:
        yield optimizer
        optimizer = getattr(optimizer, "inner_optimizer", None)


def slot_tensors(optimizer: Any, variables: Sequence[Any], paths: Sequence[str]) -> dict[str, Slot]:
    """Return a built optimizer's variables by role and path, such as `velocities/layers/0/kernel`.

    Shared variables are named by role alone: `iterations`, `learning_rate`. Inside a LossScaleOptimizer, paths begin
    with `inner_optimizer/`. The order is that of `optimizer.variables`.

    Args:
        variables: the variables it was built for, in order: the model's, or substitutes such as shards.
        paths: structural paths of the model's variables that they represent.
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
    """Return the state of an optimizer built for the model's own variables."""
    variables = trained_variables(innermost(optimizer))
    slots = slot_tensors(optimizer, variables, [structure.path(variable) for variable in variables])
    return {
        f"{prefix}/{path}": placed_tensor(slot.variable, None if slot.owner is None else variables[slot.owner])
        for path, slot in slots.items()
    }


def extend_optimizer(optimizer: Any, variables: Sequence[Any], structure: Structure) -> None:
    """Rebuild `optimizer` for `variables` and those it knows, keeping their state.

    New slots start as at the first step, and weight averages at the weights. The order is that of an optimizer built
    for all of them at once, as Keras' own files require. No effect if all are known.
    """
    known = trained_variables(innermost(optimizer))
    with_slots = {id(variable) for variable in known}
    new = [variable for variable in variables if id(variable) not in with_slots]
    if not new:
        return
    before = replicated_slots(optimizer, structure)
    trained = {id(variable) for variable in variables}
    everything = [*variables, *(variable for variable in known if id(variable) not in trained)]
    for each in chain_of(optimizer):
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


def _attributes(optimizer: Any, count: int, places: Mapping[str, int]) -> Iterator[tuple[str, int | None, Any]]:
    """Yield (role, owner's index, variable) of an optimizer of `count` variables."""
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
    """Return the owner of the slot at `key`: dicts are keyed by path, lists have one slot per variable."""
    if isinstance(slots, dict):
        return places.get(key)
    return int(key) if len(slots) == count else None
