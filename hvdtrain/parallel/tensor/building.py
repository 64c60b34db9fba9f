"""Create sharded variables that look full while a model is built.

A layer infers the shapes of its variables from preceding layers, and a custom layer may call its inner layers in
`build`: both must see full variables. So while a builder runs, a variable matched by a rule stores only its shard,
reports its full shape, and re-runs its initializer on read. At most one such variable is materialized in full at a
time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras_variables import (
    VariableState,
    assign_to_tensor,
    declare_shape,
    declared_dtype,
    hold,
    making_variables,
    set_state,
    tensor_of,
)
from hvdtrain.config.errors import ConfigError
from hvdtrain.parallel.tensor.cuts import Cut
from hvdtrain.parallel.tensor.rules import LayoutRules
from hvdtrain.state.initial_values import checksum


@dataclass
class ShardedVariable(VariableState):
    """A variable created as a shard, which looks full while the model is built."""

    variable: Any
    cut: Cut
    initializer: Callable[..., Any]
    drawn: int
    """CRC-32 of the full initial value."""
    assigned: bool = False
    """Whether it was assigned after initialization."""

    def read(self, variable: Any) -> tf.Tensor:
        """Return the full initial value, recomputed; zeros of its shape while tracing."""
        dtype = declared_dtype(variable)
        if not tf.executing_eagerly():
            return tf.zeros(self.cut.whole, dtype)
        if self.assigned:
            raise ConfigError(
                f"The variable {variable.path!r} is made as a slice, and was given another value while the model was "
                "built: it cannot be read as a whole before the model is finished. Read it before it is assigned, or "
                "assign it last."
            )
        return tf.cast(self.initializer(self.cut.whole, dtype=dtype), dtype)

    def write(self, variable: Any, value: Any) -> None:
        """Store this rank's shard of a full value."""
        self.assigned = True
        self.drawn = checksum(value)
        assign_to_tensor(variable, self.cut.slice_of(tf.cast(value, declared_dtype(variable))))


@dataclass
class Building:
    """Sharded variables created by a builder, by id."""

    rules: LayoutRules
    index: int
    ranks: int
    made: dict[int, ShardedVariable] = field(default_factory=dict)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Shard variables that match the rules inside this context."""
        with making_variables(self._create):
            yield

    def _create(self, owner: Any, initializer: Callable[..., Any], create: Callable[..., Any]) -> Any:
        cut = self.rules.cut_of(owner.path, tuple(owner.shape), self.index, self.ranks)
        if cut is None:
            return create()
        value, drawn = initial_shard(initializer, owner, cut)
        tensor = create(initial_value=value)
        self.made[id(owner)] = ShardedVariable(owner, cut, initializer, drawn)
        set_state(owner, self.made[id(owner)])
        return tensor

    def finish(self) -> list[ShardedVariable]:
        """Turn the variables into regular ones of local shape, and return them."""
        for made in self.made.values():
            set_state(made.variable, None)
            declare_shape(made.variable, made.cut.shape)
        return list(self.made.values())


def initial_shard(initializer: Callable[..., Any], variable: Any, cut: Cut) -> tuple[tf.Tensor, int]:
    """Return this rank's initial shard, and the full value's CRC-32."""
    dtype = declared_dtype(variable)
    whole = tf.cast(initializer(cut.whole, dtype=dtype), dtype)
    return cut.slice_of(whole), checksum(whole)


def shard_in_place(variable: Any, cut: Cut) -> None:
    """Replace a full Keras variable by this rank's shard."""
    whole = tensor_of(variable)
    sliced = cut.slice_of(tf.convert_to_tensor(whole))
    hold(variable, tf.Variable(sliced, trainable=whole.trainable, name=variable.name, dtype=whole.dtype))


def agree_on_shards(
    backend: Backend, made: Sequence[ShardedVariable], whole: Sequence[Any], paths: Mapping[int, str]
) -> None:
    """Make all ranks hold shards of the first rank's model. Collective along tp.

    Raises ConfigError if ranks shard other variables, or initial values differ irreproducibly.
    """
    mine = {paths[id(each.variable)]: _facts(each) for each in made}
    mine |= {paths[id(variable)]: [list(variable.shape)] for variable in whole}
    facts = gather(backend, mine, among="tp")
    for place, theirs in enumerate(facts):
        strange = [path for path in {**facts[0], **theirs} if facts[0].get(path, [0])[0] != theirs.get(path, [0])[0]]
        if strange:
            raise ConfigError(
                "Every rank splits the same variables of the same model. Received: "
                f"{strange[0]!r} of another shape, or whole, on the rank at tp={place}."
            )
    differing = [path for path, fact in facts[0].items() if any(theirs[path] != fact for theirs in facts)]
    _reinitialize(made, facts[0], differing, paths)
    # Full variables get the first rank's values before they are sharded.
    backend.broadcast({paths[id(variable)]: tensor_of(variable) for variable in whole}, among="tp")


def _facts(made: ShardedVariable) -> list[Any]:
    """Return a variable's full shape, checksum and seed; no seed if it was assigned."""
    seed = getattr(made.initializer, "seed", None)
    return [list(made.cut.whole), made.drawn, seed if isinstance(seed, int) and not made.assigned else None]


def _reinitialize(
    made: Sequence[ShardedVariable], first: Mapping[str, list[Any]], differing: Sequence[str], paths: Mapping[int, str]
) -> None:
    """Re-initialize differing variables with the first rank's seeds."""
    by_path = {paths[id(each.variable)]: each for each in made}
    for path in differing:
        _, drawn, seed = first[path]
        each = by_path[path]
        if seed is not None:
            each.initializer.seed = seed  # type: ignore[attr-defined]
        value, again = initial_shard(each.initializer, each.variable, each.cut)
        if seed is None or again != drawn:
            raise ConfigError(
                f"The ranks gave {path!r} other initial values, and hold shards of it: seed them identically, by "
                "hvdtrain.init(seed=…), keras.utils.set_random_seed or the initializer's seed."
            )
        assign_to_tensor(each.variable, value)
