"""Structural paths of a Keras model's variables, identical in every process.

Keras' own paths contain layer names, which are numbered over all models of a process: a second instance of a model has
different ones. Here a variable is named by the attributes and list indices that lead to it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import (
    LAYER_BOOKKEEPING,
    is_layer_graph,
    own_layers,
    own_non_trainable_variables,
    own_seed_generators,
    own_trainable_variables,
)
from hvdtrain.state.variables import own_attributes, unwrap


@dataclass(frozen=True)
class Structure:
    """Structural paths of a model's variables."""

    paths: Mapping[int, str]
    """Paths by the id of the tf.Variable."""
    statistics: frozenset[int]
    """Ids of the floating-point variables that layers update themselves, such as BatchNorm's moving averages.

    Not frozen weights: they were created as trainable.
    """

    def path(self, variable: Any) -> str:
        """Return the structural path of a variable of the model."""
        return self.paths[id(unwrap(variable))]

    def by_path(self, variables: list[Any]) -> dict[str, tf.Variable]:
        """Return the tf.Variables of `variables` by structural path, in order."""
        return {self.path(variable): unwrap(variable) for variable in variables}


def structure_of(model: Any) -> Structure:
    """Return the structural paths of all variables of `model`.

    A variable without an attribute is named by its index among its layer's variables; one with several by the
    alphabetically first. A model that is part of another one has an attribute `structure`, that of the full model.
    """
    whole = getattr(model, "structure", None)
    if isinstance(whole, Structure):
        return whole
    walk = _Walk()
    walk.visit(model, "")
    for place, variable in enumerate(model.variables):
        walk.name(variable, f"variables/{place}")
    return Structure(walk.paths, frozenset(walk.statistics))


def statistics_of(layer: Any) -> list[tf.Variable]:
    """Return a layer's self-updated floating-point variables, averaged over the replicas.

    A model with its own `train_step` has only those of its layers: variables assigned by the step, such as a feature
    queue, have no meaningful mean and must be equal on all replicas.
    """
    if isinstance(layer, keras.Model) and type(layer).train_step is not keras.Model.train_step:
        return []
    own = [variable for variable in own_non_trainable_variables(layer) if tf.as_dtype(variable.dtype).is_floating]
    return [unwrap(variable) for variable in own]


class _Walk:
    """Traverses a model, naming each variable on first visit."""

    def __init__(self) -> None:
        self.paths: dict[int, str] = {}
        self.statistics: set[int] = set()
        # Keeps the objects alive, so that their ids are not reused.
        self._seen: dict[int, Any] = {}
        self._taken: set[str] = set()

    def visit(self, thing: Any, path: str) -> None:
        if isinstance(thing, keras.Variable):
            self.name(thing, path)
        elif isinstance(thing, keras.random.SeedGenerator):
            self.name(thing.state, _join(path, "state"))
        elif isinstance(thing, keras.Layer | list | tuple | dict) and id(thing) not in self._seen:
            self._seen[id(thing)] = thing
            for name, child in children(thing):
                self.visit(child, _join(path, name))
            if isinstance(thing, keras.Layer):
                self._visit_bookkeeping(thing, path)

    def _visit_bookkeeping(self, layer: Any, path: str) -> None:
        """Name variables without an attribute, and collect self-updated ones."""
        for place, variable in enumerate(own_trainable_variables(layer)):
            self.name(variable, _join(path, f"variables/{place}"))
        for place, variable in enumerate(own_non_trainable_variables(layer)):
            self.name(variable, _join(path, f"non_trainable_variables/{place}"))
        self.statistics.update(id(variable) for variable in statistics_of(layer))
        for place, generator in enumerate(own_seed_generators(layer)):
            self.visit(generator, _join(path, f"seed_generators/{place}"))
        for place, child in enumerate(own_layers(layer)):
            self.visit(child, _join(path, f"layers/{place}"))

    def name(self, variable: Any, path: str) -> None:
        """Name `variable` unless it is named; `kernel` and `_kernel` of a layer get different paths."""
        tensor = unwrap(variable)
        if id(tensor) in self.paths:
            return
        count, unique = 1, path
        while unique in self._taken:
            count += 1
            unique = f"{path}#{count}"
        self.paths[id(tensor)] = unique
        self._taken.add(unique)


def children(thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield a layer's or container's members by name, in reproducible order."""
    if isinstance(thing, dict):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, list | tuple):
        yield from ((str(place), value) for place, value in enumerate(thing))
    else:
        # Functional and Sequential models are lists of layers first of all, as in Keras' own files.
        if is_layer_graph(thing):
            yield "layers", list(thing.layers)
        yield from ((name.lstrip("_"), value) for name, value in own_attributes(thing, LAYER_BOOKKEEPING))


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def seed_states(model: Any) -> list[Any]:
    """Return the states of the model's SeedGenerators (in `variables`, not in `weights`)."""
    weights = {id(unwrap(weight)) for weight in model.weights}
    extra = [variable for variable in model.variables if id(unwrap(variable)) not in weights]
    return [v for v in extra if v.path.endswith("seed_generator_state") and tuple(v.shape) == (2,)]
