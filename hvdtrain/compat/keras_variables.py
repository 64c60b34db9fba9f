"""Private names of Keras 3's variables and optimizers."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import variables

from hvdtrain.compat import unlike, uses_attribute
from hvdtrain.compat.seams import ROWS
from hvdtrain.compat.tensorflow import is_vectorized
from hvdtrain.config.errors import ConfigError

# Variables


def declared_dtype(variable: Any) -> str:
    """Return a Keras variable's stored dtype, regardless of autocasting.

    Assumes `Variable._dtype`, set before the variable has a value.
    """
    return str(variable._dtype)


def tensor_of(variable: Any) -> Any:
    """Return a Keras variable's tf.Variable (None if missing), or `variable`.

    Not `Variable.value`, which may generate, gather or cast its result. Assumes `Variable._value`.
    """
    return variable._value if isinstance(variable, keras.Variable) else variable


def autocast(variable: Any, value: Any) -> Any:
    """Cast `value` to the dtype in which the calling layer reads `variable`. Assumes `Variable._maybe_autocast`."""
    return variable._maybe_autocast(value)


def hold(variable: Any, tensor: Any) -> None:
    """Set a Keras variable's tf.Variable, possibly of another shape; None frees it, and leaves dtype and shape.

    Then zeros stand for it where a layer's output shape is inferred, and other reads raise ConfigError. Assumes
    `Variable._value` and `_shape`, and that a variable without a value is read by its `_initializer`.
    """
    variable._value = tensor
    if tensor is not None:
        declare_shape(variable, tensor.shape)
        return

    def stand_in(shape: Sequence[int], dtype: str) -> tf.Tensor:
        if is_inferring_shapes():
            return tf.zeros(shape, dtype)
        raise ConfigError(
            f"Another rank has the value of {variable.path!r}. Use Trainer.predict or Trainer.evaluate, which every "
            "rank calls."
        )

    variable._initializer = stand_in


def declare_shape(variable: Any, shape: Iterable[int]) -> None:
    """Override a Keras variable's shape. Assumes `Variable.shape` is `_shape`."""
    variable._shape = tuple(int(size) for size in shape)


def rename(variable: Any, path: str) -> None:
    """Override a Keras variable's path. Assumes `Variable.path` is `_path`."""
    variable._path = path


def replace_regularizer(variable: Any, penalty: Callable[[Any], Any]) -> None:
    """Set a Keras variable's penalty, any function of the variable.

    Assumes `Variable.regularizer` is `_regularizer`.
    """
    variable._regularizer = penalty


def when_initialized(variable: Any, then: Callable[[Any], None]) -> bool:
    """Call `then` with the tf.Variable of an uninitialized Keras variable, once created.

    Returns whether it is uninitialized: Keras defers initialization in a stateless scope, where it only infers shapes.
    Assumes `Variable._value` is None until `_initialize` sets it.
    """
    if not isinstance(variable, keras.Variable) or variable._value is not None:
        return False
    initialize = variable._initialize

    def initialize_and_tell(value: Any) -> None:
        vars(variable).pop("_initialize", None)
        initialize(value)
        then(variable._value)

    variable._initialize = initialize_and_tell
    return True


@contextmanager
def on_their_devices() -> Iterator[None]:
    """Initialize variables on the device of the code that creates them, where only shapes are inferred at first.

    Assumes `register_uninitialized_variable` of keras.src.backend.common.variables and `Variable._deferred_initialize`.
    """
    register = variables.register_uninitialized_variable

    def register_with_device(variable: Any) -> None:
        register(variable)
        initialize, device = variable._deferred_initialize, getattr(tf.no_op(), "device", "")

        def initialize_there() -> None:
            vars(variable).pop("_deferred_initialize")
            with tf.device(device):
                initialize()

        if device:
            variable._deferred_initialize = initialize_there

    variables.register_uninitialized_variable = register_with_device
    try:
        yield
    finally:
        variables.register_uninitialized_variable = register


MakeVariable = Callable[[Any, Callable[..., Any], Callable[..., tf.Variable]], tf.Variable]
"""Takes a Keras variable under creation, its initializer, and a factory of its tf.Variable, which takes an initial
value or uses Keras' own.
"""


@contextmanager
def making_variables(make: MakeVariable) -> Iterator[None]:
    """Create by `make` each tf.Variable that an initializer fills inside the context.

    Assumes the initial value is a function whose closure holds the Keras variable (`self`) and its `initializer`.
    Raises CompatibilityError if it does not: all variables would be materialized in full.
    """
    seen: list[Any] = []

    def create(next_creator: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        def plainly(**others: Any) -> tf.Variable:
            return next_creator(**{**options, **others})

        variable, initializer = _asker(options.get("initial_value"))
        if variable is None:
            return plainly()
        if not seen:  # the probe
            seen.append(variable)
            return plainly()
        return make(variable, initializer, plainly)

    with tf.variable_creator_scope(create):
        with tf.init_scope():
            probe = keras.Variable(keras.initializers.Zeros(), shape=(1,), name="probe")
        if not any(probe is each for each in seen):
            raise unlike(
                "keras", making_variables, "The initial value of a Keras variable is a function that holds both"
            )
        yield


def _asker(initial_value: Any) -> tuple[Any, Any]:
    """Return the Keras variable under creation and its initializer; None for other initial values."""
    code = getattr(initial_value, "__code__", None)
    if code is None or set(code.co_freevars) != {"initializer", "self"}:
        return None, None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, initial_value.__closure__, strict=True)}
    return (held["self"], held["initializer"]) if isinstance(held["self"], keras.Variable) else (None, None)


@contextmanager
def reading_rows() -> Iterator[None]:
    """Let `tf.gather`, and so `keras.ops.take`, read rows of a Keras variable alone, as they do of a tf.Variable.

    For an optimizer that updates rows alone: Keras' variables are read as a whole there, which TensorFlow copies in
    each step once rows of it were updated. One that is updated as a whole it would copy in each update, once rows of
    it were read. What is not trained, has no tensor of its own, or another in a stateless scope, is read as before, and
    so is what has no such operation: within tf.vectorized_map, of other dtypes, and for numbers of less than 32 bits.
    Assumes that Keras hands a variable on to `tf.gather`, which asks it for `sparse_read`.
    """

    def sparse_read(variable: Any, indices: Any, name: str | None = None) -> Any:
        stands_for_another = is_stateless() or state_of(variable) is not None or not variable.trainable
        made = declared_dtype(variable) in _READ_BY_ROWS and tf.as_dtype(indices.dtype) in (tf.int32, tf.int64)
        if stands_for_another or not made or is_vectorized(tf.compat.v1.get_default_graph()):
            raise AttributeError("sparse_read")  # tf.gather reads the whole
        return autocast(variable, tensor_of(variable).sparse_read(indices, name=name))

    with ROWS.replaced(keras.Variable, sparse_read):
        yield


_READ_BY_ROWS = ("float16", "bfloat16", "float32", "float64")


class VariableState:
    """Stands for a Keras variable's tensor where that is empty, or not what counts."""

    def read(self, variable: Any) -> Any:
        """Return the value in the declared dtype; None for the tensor's."""
        raise NotImplementedError

    def write(self, variable: Any, value: Any) -> None:
        """Store an assigned value."""
        raise NotImplementedError

    def reinitialize(self, variable: Any, initializer: Any) -> None:
        """Take the initial value of another initializer."""
        variable.assign(initializer(variable.shape, dtype=variable.dtype))


def state_of(variable: Any) -> VariableState | None:
    """Return the state that a Keras variable is in; None if its tensor is read and assigned."""
    found: VariableState | None = vars(variable).get(_STATE)
    return found


def set_state(variable: Any, state: VariableState | None) -> None:
    """Let a Keras variable be read and assigned by `state`; None: by its tensor.

    Assumes reads go through `Variable.value` and assignments through `_direct_assign`.
    """
    before = state_of(variable)
    if state is not None:
        vars(variable)[_STATE] = state
        if before is None:
            variable.__class__ = _with_state(variable.__class__)
    elif before is not None:
        del vars(variable)[_STATE]
        variable.__class__ = type(variable).__base__


_STATE = "_hvdtrain_state"


@functools.cache
def _with_state(kind: type) -> type:
    """Return the subclass of a class of Keras variables whose instances are in a state."""

    def value(variable: Any) -> Any:
        found = vars(variable)[_STATE].read(variable)
        return kind.value.fget(variable) if found is None else autocast(variable, found)  # type: ignore[attr-defined]

    def assign(variable: Any, value: Any) -> None:
        vars(variable)[_STATE].write(variable, value)

    return type(kind.__name__, (kind,), {"value": property(value), "_direct_assign": assign})


def assign_to_tensor(variable: Any, value: Any) -> None:
    """Assign to a Keras variable's tf.Variable, whatever its class. Assumes `Variable._direct_assign`."""
    keras.Variable._direct_assign(variable, value)


def is_stateless() -> bool:
    """Return whether Keras is in a stateless scope, which captures updates.

    Assumes `in_stateless_scope` in keras.src.backend.
    """
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return bool(in_stateless_scope())


def is_inferring_shapes() -> bool:
    """Return whether Keras is tracing a layer for shape inference only.

    Assumes it does so in a stateless scope.
    """
    return is_stateless() and not tf.executing_eagerly()


# Optimizers


def disable_gradient_sums(optimizer: Any) -> None:
    """Disable an optimizer's gradient sum over the replicas of a tf.distribute strategy.

    Assumes each update calls `_all_reduce_sum_gradients` with (gradient, variable) pairs. Raises CompatibilityError if
    it does not: gradients would be counted once per replica.
    """
    kind = type(optimizer)
    if not hasattr(kind, "_all_reduce_sum_gradients") or not uses_attribute(kind, "_all_reduce_sum_gradients"):
        raise unlike(
            "keras", disable_gradient_sums, f"{kind.__name__} sums gradients in _all_reduce_sum_gradients alone"
        )
    optimizer._all_reduce_sum_gradients = list


def trained_variables(optimizer: Any) -> list[Any]:
    """Return the variables an optimizer was built for; else empty. Assumes `Optimizer._trainable_variables`."""
    return list(optimizer._trainable_variables)


def step_counter(optimizer: Any) -> Any:
    """Return the step counter, which counts accumulation steps, too. Assumes `Optimizer._iterations`."""
    return optimizer._iterations


def rate_or_schedule(optimizer: Any) -> Any:
    """Return the learning-rate variable or schedule. Assumes `Optimizer._learning_rate`."""
    return optimizer._learning_rate


def rate_after_update(optimizer: Any, rate: Callable[[], Any]) -> Any:
    """Return what `rate`, an optimizer's method of `seams.RATE`, returns once it has counted one more update.

    Assumes it derives the rate of a schedule from `Optimizer._iterations`.
    """
    count = optimizer._iterations
    with keras.StatelessScope([(count, count.value + 1)]):
        return rate()


def slot_of(optimizer: Any, slots: Sequence[Any], variable: Any) -> Any:
    """Return the element of `slots`, one per variable, for `variable`.

    Assumes `Optimizer._get_variable_index`, of a Keras variable or its tf.Variable.
    """
    return slots[optimizer._get_variable_index(variable)]


def adam_slots(optimizer: Any, variable: Any) -> tuple[Any, Any]:
    """Return Adam's first and second moment of `variable`. Assumes `Adam._momentums` and `_velocities`."""
    return slot_of(optimizer, optimizer._momentums, variable), slot_of(optimizer, optimizer._velocities, variable)


def average_of(optimizer: Any, variable: Any) -> Any:
    """Return the EMA of `variable`; None for variables overwritten by Keras.

    Assumes `Optimizer._model_variables_moving_average`, with `use_ema`.
    """
    return slot_of(optimizer, optimizer._model_variables_moving_average, variable)


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Return whether weight decay applies to `variable`. Assumes `Optimizer._use_weight_decay`."""
    return bool(optimizer._use_weight_decay(variable))


def set_decayed(optimizer: Any, variable: Any, decayed: bool) -> None:
    """Set whether weight decay applies to `variable`, regardless of its name.

    Assumes `Optimizer._use_weight_decay` consults `_exclude_from_weight_decay_cache`, by `_var_key`, first. Raises
    CompatibilityError: it does not: shards and full variables would be decayed differently.
    """
    is_decayed(optimizer, variable)  # makes the cache
    optimizer._exclude_from_weight_decay_cache[optimizer._var_key(variable)] = decayed
    if is_decayed(optimizer, variable) != decayed:
        raise unlike("keras", set_decayed, "Optimizer._use_weight_decay looks into _exclude_from_weight_decay_cache")


@contextmanager
def updating_at(optimizer: Any, count: Any, rate: Any, *, updates_per_step: int = 1) -> Iterator[None]:
    """Count an optimizer's updates in the Keras variable `count`, at the learning rate `rate`, inside the context.

    An EMA of weights remembers as many steps as before, of `updates_per_step` updates each. Assumes that
    `Optimizer._iterations` and `_get_current_learning_rate` give them.
    """
    own = vars(optimizer)
    changed = {"_iterations": count, "_get_current_learning_rate": lambda: rate}
    if optimizer.use_ema:
        changed["ema_momentum"] = optimizer.ema_momentum ** (1 / updates_per_step)
        if optimizer.ema_overwrite_frequency:
            changed["ema_overwrite_frequency"] = optimizer.ema_overwrite_frequency * updates_per_step
    before = {name: own[name] for name in changed if name in own}
    own.update(changed)
    try:
        yield
    finally:
        for name in changed:
            del own[name]
        own.update(before)


class OptimizerWithOwnDecay(keras.optimizers.Optimizer):
    """Keras optimizer whose update includes the weight decay.

    Assumes `Optimizer.apply` decays weights by `_apply_weight_decay`.
    """

    def build(self, variables: Sequence[Any]) -> None:
        """Create the variables. Raises CompatibilityError if Keras decays weights elsewhere: they would decay twice."""
        if not uses_attribute(keras.optimizers.Optimizer, "_apply_weight_decay"):
            raise unlike("keras", OptimizerWithOwnDecay, "Optimizer.apply decays weights by _apply_weight_decay")
        super().build(variables)

    def _apply_weight_decay(self, variables: Any) -> None:
        """No-op."""


OPTIMIZER_BOOKKEEPING = frozenset({"_variables", "_trainable_variables", "_trainable_variables_indices", "_tracker"})
"""Attributes in which Keras tracks values that an optimizer's other attributes hold already."""


def forget_slots(optimizer: Any) -> None:
    """Reset an optimizer to its unbuilt state: only step counter and learning rate.

    Assumes `_variables` lists all variables, `_trainable_variables_indices` the trained ones, `_tracker` the saved
    ones, and `_exclude_from_weight_decay_cache`, made again, which of them decay.
    """
    first = {id(optimizer._iterations), id(optimizer._learning_rate)}
    kept = [variable for variable in optimizer._variables if id(variable) in first]
    # As in its constructor, where nothing is tracked yet: a list that loses elements could not be saved any more.
    tracker = vars(optimizer).pop("_tracker")
    vars(optimizer).pop("_exclude_from_weight_decay_cache", None)
    optimizer._variables = kept
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    vars(optimizer)["_tracker"] = tracker
    track_variables(optimizer)


def track_variables(optimizer: Any) -> None:
    """Let Keras track, and so save, the variables in an optimizer's list. Assumes `_variables` and `_tracker`."""
    tracker = optimizer._tracker
    is_variable, _ = tracker.config["variables"]
    tracker.config["variables"] = (is_variable, optimizer._variables)
    tracker.stored_ids["variables"] = {id(variable) for variable in optimizer._variables}


def momentum_slots(optimizer: Any) -> list[Any] | None:
    """Return a built optimizer's momentum variables; None if unknown. Assumes `momentums` or `_momentums`."""
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def load_optimizer_weights(group: Any) -> list[Any]:
    """Return an optimizer's arrays from a Keras 2 file (HDF5).

    Assumes keras.src.legacy.saving.legacy_h5_format.
    """
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    return list(load_optimizer_weights_from_hdf5_group(group))
