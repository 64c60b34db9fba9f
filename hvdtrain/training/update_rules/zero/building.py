"""Build models with sharded parameters: no rank of stage 3 ever holds the full model.

While a function builds the model, each large variable is initialized in full, as in every other layout, and freed
before the next one; a rank keeps its shard. A read re-runs the initializer; of an assigned value, as by `load_weights`,
only the shard is kept.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras_variables import declared_dtype, making_variables
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.state.initial_values import is_deterministic
from hvdtrain.state.structure import structure_of
from hvdtrain.state.variables import free_memory, unwrap
from hvdtrain.training.update_rules.zero.initial_slice import InitialSlice, initial_slice_of
from hvdtrain.training.update_rules.zero.shards import SMALL_BYTES, flat_slice, stays_whole


def build_with_shards(build: Callable[[], Any], backend: Backend) -> Any:
    """Return the model built by `build`, with large parameters sharded. Collective.

    If ranks initialize differently, the first rank's values are used. Raises ConfigError for ranks that build different
    models, or assign different values.
    """
    building = _Building(backend)
    with building.scope():
        model = build()
    building.finish(model)
    return model


def is_built_sharded(model: Any) -> bool:
    """Return whether `model` has sharded parameters without an update rule."""
    return any(initial_slice_of(variable) is not None for variable in model.variables)


def gather_initial(initial: InitialSlice, backend: Backend, name: str) -> None:
    """All-gather a sharded variable. Collective, with the same name."""
    assert initial.values is not None, "every slice is kept as it is made"
    gather = tf.function(lambda mine: backend.run(lambda: backend.all_gather(mine, name=name)), autograph=False)
    initial.fill(gather.get_concrete_function(initial.values)(initial.values))


class _Building:
    """Sharded variables created by a builder."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._made: list[InitialSlice] = []

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Shard large variables inside this context."""
        with making_variables(self._create):
            yield

    def _create(self, owner: Any, initializer: Any, create: Callable[..., Any]) -> Any:
        # Others are sharded once the model is built.
        if not (type(owner) is keras.Variable and _is_large(owner) and is_deterministic(initializer)):
            return create()
        initial = self._slice_of(owner, initializer)
        whole = initial.draw()
        tensor = create(initial_value=whole)
        initial.keep(whole)
        free_memory(tensor)
        initial.show_drawn()
        self._made.append(initial)
        return tensor

    def finish(self, model: Any) -> None:
        """Shard all large parameters of `model` consistently, and keep everything else full. Collective."""
        _agree(self._made, self._backend)
        mine = {id(variable) for variable in model.trainable_variables} if model.built else set()
        for number, initial in enumerate(self._made):
            if id(initial.variable) in mine and not stays_whole(initial.variable):
                initial.close()
            else:
                gather_initial(initial, self._backend, f"zero_initial/{number}")
        if model.built:
            self._cut_others(model)

    def _cut_others(self, model: Any) -> None:
        """Shard variables initialized otherwise, such as by a user's initializer."""
        path_of = structure_of(model).path
        for variable in model.trainable_variables:
            if initial_slice_of(variable) is None and not stays_whole(variable):
                self._backend.broadcast({f"zero_initial/{path_of(variable)}": unwrap(variable)})
                initial = self._slice_of(variable)
                initial.keep(unwrap(variable))
                initial.close()

    def _slice_of(self, variable: Any, initializer: Any = None) -> InitialSlice:
        elements = int(tf.TensorShape(variable.shape).num_elements())
        return InitialSlice(variable, *flat_slice(elements, self._backend), initializer)


def _is_large(variable: Any) -> bool:
    """Return whether a new variable will be sharded, as far as known."""
    if not (variable.trainable and tf.executing_eagerly()):
        return False
    elements = int(tf.TensorShape(variable.shape).num_elements())
    return elements * tf.as_dtype(declared_dtype(variable)).size > SMALL_BYTES


def _agree(made: Sequence[InitialSlice], backend: Backend) -> None:
    """Make all ranks' shards those of the first rank's model. Collective.

    Raises ConfigError if ranks create other variables, or assign other values.
    """
    mine = [[_kind(each), each.checksum, each.seed] for each in made]
    facts = gather(backend, mine, among="replicas")
    for rank, theirs in enumerate(facts):
        if [kind for kind, *_ in theirs] != [kind for kind, *_ in facts[0]]:
            raise ConfigError(
                "Every rank builds the same model. Received: a function that makes other variables on rank "
                f"{rank} than on rank 0."
            )
    for number, each in enumerate(made):
        checksums = [theirs[number][1] for theirs in facts]
        if len(set(checksums)) > 1:
            _draw_as_first(each, *facts[0][number][1:])


def _kind(initial: InitialSlice) -> str:
    return f"{declared_dtype(initial.variable)}{list(initial.variable.shape)}"


def _draw_as_first(initial: InitialSlice, checksum: int, seed: int | None) -> None:
    """Re-initialize a differing variable with the first rank's seed."""
    if seed is not None:
        initial.initializer.seed = seed
        initial.keep(initial.draw())
    if seed is None or initial.checksum != checksum:
        raise ConfigError(
            f"The ranks gave {initial.variable.path} other values while they built the model, and {opt('zero', 3)} "
            "keeps slices of them: load them on every rank, seed the initializers identically (hvdtrain.init(seed=…)), "
            "or give Trainer the built model in place of a function, which takes those of rank 0."
        )
