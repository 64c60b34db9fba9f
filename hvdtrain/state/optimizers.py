"""The optimizers that a model holds: besides `model.optimizer` those in attributes, as GANs have them."""

from typing import Any

import keras

from hvdtrain.state.structure import children

MAIN = "optimizer"
"""Path of the optimizer that `Model.compile` sets."""


def optimizers_of(model: Any) -> dict[str, Any]:
    """Return the optimizers that the attributes of `model` and its layers hold, by path, `model.optimizer` first.

    Lists, tuples and dicts are looked into: `d_optimizer`, `optimizers/0`, `critic/optimizer`. An optimizer that
    several attributes hold has the first of their paths, in alphabetical order; one that wraps another stands for both.
    """
    found: dict[str, Any] = {}
    main = getattr(model, MAIN, None)
    if isinstance(main, keras.optimizers.Optimizer):
        found[MAIN] = main
    _search(model, "", found, seen={})
    wrapped = {id(inner) for optimizer in found.values() for inner in _inside(optimizer)}
    return {path: optimizer for path, optimizer in found.items() if id(optimizer) not in wrapped}


def _search(thing: Any, path: str, found: dict[str, Any], seen: dict[int, Any]) -> None:
    seen[id(thing)] = thing  # kept, so that no other object is given its id
    for name, child in children(thing):
        place = f"{path}/{name}" if path else name
        if isinstance(child, keras.optimizers.Optimizer):
            if all(child is not known for known in found.values()):
                found[place] = child
        elif isinstance(child, keras.Layer | list | tuple | dict) and id(child) not in seen:
            _search(child, place, found, seen)


def _inside(optimizer: Any) -> list[Any]:
    """Return the optimizers that `optimizer` wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else [inner, *_inside(inner)]
