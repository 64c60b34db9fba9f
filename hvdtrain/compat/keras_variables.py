"""Private names of Keras 3's variables and optimizers, by what hvdtrain uses them for."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat import unlike, uses_attribute

# Variables


def declared_dtype(variable: Any) -> str:
    """Return the dtype in which a Keras variable is kept, whatever a layer of mixed precision reads it as.

    Assumed: `Variable._dtype`, which is there before the variable has a value.
    """
    return str(variable._dtype)


def tensor_of(variable: Any) -> Any:
    """Return the tf.Variable under a Keras variable, None where there is none yet; `variable` if it is no Keras one.

    Not `Variable.value`: what is read may be drawn, gathered or converted for its reader.
    Assumed: `Variable._value`.
    """
    return variable._value if isinstance(variable, keras.Variable) else variable


def autocast(variable: Any, value: Any) -> Any:
    """Return `value` as a layer reads `variable`: in its compute dtype, inside the call of one of mixed precision.

    Assumed: `Variable._maybe_autocast`.
    """
    return variable._maybe_autocast(value)


def hold(variable: Any, tensor: Any) -> None:
    """Let a Keras variable be one with this tf.Variable, of another shape maybe; None: it cannot be read.

    Assumed: `Variable._value` and `_shape`.
    """
    variable._value = tensor
    if tensor is not None:
        declare_shape(variable, tensor.shape)


def declare_shape(variable: Any, shape: Iterable[int]) -> None:
    """Let a Keras variable say that it has another shape.

    Assumed: `Variable.shape` is `_shape`.
    """
    variable._shape = tuple(int(size) for size in shape)


def rename(variable: Any, path: str) -> None:
    """Let a Keras variable have another path.

    Assumed: `Variable.path` is `_path`.
    """
    variable._path = path


def replace_regularizer(variable: Any, penalty: Callable[[Any], Any]) -> None:
    """Let a Keras variable have a penalty that need not be one of Keras' regularizers.

    Assumed: `Variable.regularizer` is `_regularizer`, and is called with the variable.
    """
    variable._regularizer = penalty


def when_initialized(variable: Any, then: Callable[[Any], None]) -> bool:
    """Call `then` with the tf.Variable that a Keras variable without a value is going to get, once.

    Returns:
        Whether it is one. Keras makes such while it looks for shapes alone, in a stateless scope.

    Assumed: `Variable._value` is None until `_initialize`, which sets it.
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


MakeVariable = Callable[[Any, Callable[..., Any], Callable[..., tf.Variable]], tf.Variable]
"""Takes a Keras variable that is being made, its initializer, and a function that makes the tf.Variable under it: with
the initial value that it is given, or as Keras asks."""


@contextmanager
def making_variables(make: MakeVariable) -> Iterator[None]:
    """Let `make` make the tf.Variable under each Keras variable that an initializer draws inside the context.

    Assumed: Keras gives TensorFlow a function whose closure holds the variable, `self`, and its `initializer`.

    Raises:
        CompatibilityError: it does not: all variables would be whole in memory.
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
    """Return the Keras variable that asks for a tf.Variable, and its initializer; None for other initial values."""
    code = getattr(initial_value, "__code__", None)
    if code is None or set(code.co_freevars) != {"initializer", "self"}:
        return None, None
    held = {name: cell.cell_contents for name, cell in zip(code.co_freevars, initial_value.__closure__, strict=True)}
    return (held["self"], held["initializer"]) if isinstance(held["self"], keras.Variable) else (None, None)


class LazyVariable(keras.Variable):
    """A Keras variable whose value is not in memory as it is read: made by setting the class of an existing variable.

    Assumed: whoever reads a variable goes through `value`, and whoever assigns to it through `_direct_assign`.
    """

    @property
    def value(self) -> Any:
        """What `read` returns, or Keras' own value."""
        found = self.read()
        return super().value if found is None else autocast(self, found)

    def read(self) -> Any:
        """Return the value, in the declared dtype; None for that of a variable as Keras makes it."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Take a value that is assigned."""
        raise NotImplementedError

    def _direct_assign(self, value: Any) -> None:
        self.write(value)


def assign_to_tensor(variable: Any, value: Any) -> None:
    """Assign to the tf.Variable under a Keras variable, as Keras does, whatever the variable's class.

    Assumed: `Variable._direct_assign`.
    """
    keras.Variable._direct_assign(variable, value)


def is_stateless() -> bool:
    """Whether Keras keeps what changes aside at this place: values of variables, losses.

    Assumed: `in_stateless_scope` in keras.src.backend.
    """
    from keras.src.backend.common.stateless_scope import in_stateless_scope

    return bool(in_stateless_scope())


def finds_shapes_alone() -> bool:
    """Whether Keras runs a layer's call for its shapes alone at this place, in a graph that nobody runs.

    Assumed: it does so in a stateless scope.
    """
    return is_stateless() and not tf.executing_eagerly()


# Optimizers


def disable_gradient_sums(optimizer: Any) -> None:
    """Keep `optimizer`, as long as it lives, from adding gradients up over the replicas of a tf.distribute strategy.

    Assumed: each update asks the optimizer's `_all_reduce_sum_gradients` for the sums, of (gradient, variable) pairs.

    Raises:
        CompatibilityError: it does not: gradients would be counted once for each replica.
    """
    kind = type(optimizer)
    if not hasattr(kind, "_all_reduce_sum_gradients") or not uses_attribute(kind, "_all_reduce_sum_gradients"):
        raise unlike(
            "keras", disable_gradient_sums, f"{kind.__name__} sums gradients in _all_reduce_sum_gradients alone"
        )
    optimizer._all_reduce_sum_gradients = list


def trained_variables(optimizer: Any) -> list[Any]:
    """Return the variables that an optimizer was built for; empty before.

    Assumed: `Optimizer._trainable_variables`.
    """
    return list(optimizer._trainable_variables)


def step_counter(optimizer: Any) -> Any:
    """Return the variable that counts the steps, those of gradient accumulation one by one.

    Assumed: `Optimizer._iterations`.
    """
    return optimizer._iterations


def rate_or_schedule(optimizer: Any) -> Any:
    """Return the variable of the learning rate, or the schedule that it comes from.

    Assumed: `Optimizer._learning_rate`.
    """
    return optimizer._learning_rate


def slot_of(optimizer: Any, slots: Sequence[Any], variable: Any) -> Any:
    """Return that one of `slots`, which are of all variables, which is of `variable`.

    Assumed: `Optimizer._get_variable_index`, of a Keras variable or the tf.Variable under it.
    """
    return slots[optimizer._get_variable_index(variable)]


def adam_slots(optimizer: Any, variable: Any) -> tuple[Any, Any]:
    """Return Adam's averages of the gradient and of its square, of `variable`.

    Assumed: `Adam._momentums` and `_velocities`.
    """
    return slot_of(optimizer, optimizer._momentums, variable), slot_of(optimizer, optimizer._velocities, variable)


def average_of(optimizer: Any, variable: Any) -> Any:
    """Return the moving average of `variable`; None for variables that Keras overwrites instead of training.

    Assumed: `Optimizer._model_variables_moving_average`, with `use_ema`.
    """
    return slot_of(optimizer, optimizer._model_variables_moving_average, variable)


def is_decayed(optimizer: Any, variable: Any) -> bool:
    """Whether weight decay is for `variable`, which `exclude_from_weight_decay` may say by its name.

    Assumed: `Optimizer._use_weight_decay`.
    """
    return bool(optimizer._use_weight_decay(variable))


def set_decayed(optimizer: Any, variable: Any, decayed: bool) -> None:
    """Let weight decay be for `variable` or not, whatever its name.

    Assumed: `Optimizer._use_weight_decay` looks into `_exclude_from_weight_decay_cache` first, by `_var_key`.

    Raises:
        CompatibilityError: it does not: slices would decay that whole variables do not, or the other way round.
    """
    is_decayed(optimizer, variable)  # makes the cache
    optimizer._exclude_from_weight_decay_cache[optimizer._var_key(variable)] = decayed
    if is_decayed(optimizer, variable) != decayed:
        raise unlike("keras", set_decayed, "Optimizer._use_weight_decay looks into _exclude_from_weight_decay_cache")


class OptimizerWithOwnDecay(keras.optimizers.Optimizer):
    """A Keras optimizer whose weight decay is a part of its update.

    Assumed: `Optimizer.apply` decays weights by `_apply_weight_decay`.
    """

    def build(self, variables: Sequence[Any]) -> None:
        """Create the variables.

        Raises:
            CompatibilityError: it does not: weights would decay twice.
        """
        if not uses_attribute(keras.optimizers.Optimizer, "_apply_weight_decay"):
            raise unlike("keras", OptimizerWithOwnDecay, "Optimizer.apply decays weights by _apply_weight_decay")
        super().build(variables)

    def _apply_weight_decay(self, variables: Any) -> None:
        """Do nothing."""


OPTIMIZER_BOOKKEEPING = frozenset({"_variables", "_trainable_variables", "_trainable_variables_indices", "_tracker"})
"""Attributes in which Keras lists what an optimizer's other attributes hold already."""


def forget_slots(optimizer: Any) -> None:
    """Let `optimizer` be as before it was built: with a count of steps and a learning rate, and nothing else.

    Assumed: `_variables` lists them all, `_trainable_variables_indices` those that it was built for, and `_tracker`
    those that it saves.
    """
    first = {id(optimizer._iterations), id(optimizer._learning_rate)}
    kept = [variable for variable in optimizer._variables if id(variable) in first]
    # As in its constructor, where nothing is tracked yet: a list that loses elements could not be saved any more.
    tracker = vars(optimizer).pop("_tracker")
    optimizer._variables = kept
    optimizer._trainable_variables_indices = {}
    optimizer.built = False
    vars(optimizer)["_tracker"] = tracker
    is_variable, _ = tracker.config["variables"]
    tracker.config["variables"] = (is_variable, optimizer._variables)
    tracker.stored_ids["variables"] = {id(variable) for variable in kept}


def momentum_slots(optimizer: Any) -> list[Any] | None:
    """Return the velocities of an optimizer with momentum that is built; None if it has none that are known.

    Assumed: `momentums` or `_momentums`.
    """
    return getattr(optimizer, "momentums", getattr(optimizer, "_momentums", None))


def load_optimizer_weights(group: Any) -> list[Any]:
    """Return the arrays of an optimizer in a file of Keras 2 (HDF5).

    Assumed: keras.src.legacy.saving.legacy_h5_format.
    """
    from keras.src.legacy.saving.legacy_h5_format import load_optimizer_weights_from_hdf5_group

    return list(load_optimizer_weights_from_hdf5_group(group))
