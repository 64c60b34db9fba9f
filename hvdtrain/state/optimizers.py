"""Optimizers of a model: `model.optimizer` and those in attributes, as in GANs."""

from typing import Any

import keras

from hvdtrain.state.structure import children

MAIN = "optimizer"
"""Path of the optimizer set by `Model.compile`."""


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
    wrapped = {id(inner) for optimizer in found.values() for inner in _inside(optimizer)}
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


def _inside(optimizer: Any) -> list[Any]:
    """Return the optimizers that `optimizer` wraps."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return [] if inner is None else [inner, *_inside(inner)]
