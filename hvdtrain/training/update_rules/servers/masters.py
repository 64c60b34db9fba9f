"""What servers update: copies of the variables, and the optimizer's slots for them."""

from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras_variables import average_of, is_decayed, rename, set_decayed
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.compiled import run_once
from hvdtrain.runtime.placement import whole_box
from hvdtrain.state.lent_optimizer import LentOptimizer
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor
from hvdtrain.state.optimizers import Slot, slot_tensors
from hvdtrain.state.variables import free_memory, unwrap


class Masters:
    """Copies of the model's variables, which the optimizer is built for.

    Args:
        backend: the ranks.
        variables: the model's, as Keras variables, by path.
        owners: the rank that has a variable's master and slots, where the others have placeholders.
        option: the rule's, for messages.
    """

    def __init__(self, backend: Backend, variables: Mapping[str, Any], owners: Mapping[str, int], option: str) -> None:
        self._backend = backend
        self._variables = variables
        self._owners = owners
        self._option = option
        self._slot_shapes: dict[str, tuple[int, ...]] = {}
        self.by_path = {path: _copy_of(v, placeholder=not self.has(path)) for path, v in variables.items()}

    def has(self, path: str) -> bool:
        """Return whether this rank has a variable's master."""
        return self._owners.get(path, self._backend.index) == self._backend.index

    @property
    def held(self) -> dict[str, tf.Variable]:
        """This rank's masters."""
        return {path: unwrap(master) for path, master in self.by_path.items() if self.has(path)}

    def build(self, optimizer: Any) -> None:
        """Build the optimizer. Collective."""
        self._optimizer, inner = optimizer, innermost(optimizer)
        optimizer.build(list(self.by_path.values()))
        for path, master in self.by_path.items():
            set_decayed(inner, master, is_decayed(inner, self._variables[path]) and is_decayed(inner, master))
        self._lent = LentOptimizer(optimizer, self._option)
        self._lent.keep_from_files()
        if self._owners:
            mine = {
                path: list(slot.variable.shape) for path, slot in self._slots_of_variables() if self._has_slot(slot)
            }
            everyone = gather(self._backend, mine)
            self._slot_shapes = {path: tuple(shape) for each in everyone for path, shape in each.items()}

    def divide(self, owners: Mapping[str, int]) -> None:
        """Leave variables, which every rank has by now, to their owners, and free the memory of all others."""
        self._owners = owners
        self._slot_shapes = {path: tuple(slot.variable.shape) for path, slot in self._slots_of_variables()}
        let_go = [slot.variable for _, slot in self._slots_of_variables() if not self._has_slot(slot)]
        for variable in (*let_go, *(unwrap(v) for path, v in self.by_path.items() if not self.has(path))):
            free_memory(variable)

    def give_back(self, model: Any, *, whole: bool) -> None:
        """Let the optimizer be the model's, if `whole` with the slots of those that have them. Collective."""
        if self._lent.given_back:
            return
        self._lent.give_back(model, self._whole_slots() if whole else None)

    def _whole_slots(self) -> dict[str, tf.Variable]:
        """Return all slots by path, as their owners have them; else as rank 0 has. Collective."""
        slots, first = self.slots(), min(self._owners.values(), default=0)
        whole = {
            path: tf.Variable(
                slot.variable if self._has_slot(slot) else tf.zeros(self._slot_shapes[path], slot.variable.dtype),
                trainable=False,
            )
            for path, slot in slots.items()
        }
        owners = {
            path: first if slot.owner is None else self._owners.get(self.owner_of(slot.owner), 0)
            for path, slot in slots.items()
        }
        share_out(self._backend, whole, owners)
        return whole

    def take_back(self, model: Any) -> None:
        """Serve with the optimizer again, and with what its slots have become meanwhile."""
        whole = self._lent.take_back(model)
        for path, slot in self.slots().items() if whole else ():
            if path in whole and self._has_slot(slot):
                slot.variable.assign(whole[path])

    def _slots_of_variables(self) -> list[tuple[str, Slot]]:
        return [(path, slot) for path, slot in self.slots().items() if slot.owner is not None]

    def _has_slot(self, slot: Slot) -> bool:
        return slot.owner is None or self.has(self.owner_of(slot.owner))

    def slots(self) -> dict[str, Slot]:
        """Return the optimizer's variables by role and path."""
        return slot_tensors(self._optimizer, list(self.by_path.values()), list(self.by_path))

    def advanced_by_updates(self) -> list[str]:
        """Return the roles of what the innermost optimizer has for all variables, beside steps and rate (Nadam's)."""
        slots = slot_tensors(innermost(self._optimizer), list(self.by_path.values()), list(self.by_path))
        shared = (role for role, slot in slots.items() if slot.owner is None)
        return [role for role in shared if role not in ("iterations", "learning_rate")]

    def owner_of(self, slot: int) -> str:
        """Return the path of the variable that `Slot.owner` counts."""
        return list(self.by_path)[slot]

    def named_tensors(self) -> dict[str, NamedTensor]:
        """Return the slots, each where its master is."""
        return {f"optimizer/{path}": self._named_tensor(path, slot) for path, slot in self.slots().items()}

    def _named_tensor(self, path: str, slot: Slot) -> NamedTensor:
        if slot.owner is None or self.owner_of(slot.owner) not in self._owners:
            return replicated_tensor(slot.variable)
        # A number is saved as one element, since a slice of it cannot be empty.
        shape = self._slot_shapes.get(path, tuple(slot.variable.shape)) or (1,)
        region = whole_box(shape) if self._has_slot(slot) else tuple(slice(0, 0) for _ in shape)
        return NamedTensor(slot.variable, shape, region, replicated=False)

    def take(self) -> None:
        """Set the masters to the model's weights."""
        for path, master in self.held.items():
            master.assign(self._variables[path])

    def begin_averages(self) -> None:
        """Set averages of weights, which begin as zeros, to the masters: a copy without samples never moves them."""
        inner = innermost(self._optimizer)
        for path, master in self.held.items() if inner.use_ema else ():
            average = average_of(inner, self.by_path[path])
            if average is not None:
                average.assign(master)

    def give(self) -> None:
        """Set the model's weights to the masters. Collective where these are divided."""
        held = self.held
        for path in held.keys() - self._owners.keys():
            unwrap(self._variables[path]).assign(held[path])
        if self._owners:
            divided = {path: unwrap(self._variables[path]) for path in self._owners}
            share_out(self._backend, divided, self._owners, held=held)

    def share_slots(self) -> None:
        """Give all ranks the slots that belong to no variable, but for the count of steps. Collective."""
        slots = {path: slot.variable for path, slot in self.slots().items() if slot.owner is None}
        slots.pop("iterations", None)
        first = min(self._owners.values(), default=0)
        share_out(self._backend, slots, dict.fromkeys(slots, first))

    def averages(self) -> list[tuple[Any, tf.Tensor]]:
        """Return the model's variables with their averages. Collective where these are divided."""
        inner = innermost(self._optimizer)
        found = {path: average_of(inner, master) for path, master in self.by_path.items()}
        averages = {path: tf.identity(average) for path, average in found.items() if average is not None}
        whole = {
            path: tf.Variable(average if self.has(path) else tf.zeros_like(self._variables[path]), trainable=False)
            for path, average in averages.items()
            if path in self._owners
        }
        if whole:
            share_out(self._backend, whole, self._owners)
        averages |= {path: average.value() for path, average in whole.items()}
        return [(self._variables[path], average) for path, average in averages.items()]


def share_out(
    backend: Backend,
    variables: Mapping[str, tf.Variable],
    owners: Mapping[str, int],
    held: Mapping[str, tf.Variable] | None = None,
) -> None:
    """Assign the values of their owners, those in `held` if given, once all ranks have come here. Collective."""
    read = held or {}

    def share() -> None:
        with tf.control_dependencies([barrier(backend, "shared")]):
            for path, variable in variables.items():
                value = read.get(path, variable).read_value()
                variable.assign(backend.broadcast_value(value, root=owners[path], name=f"async/{path}"))

    run_once(lambda: backend.run(share))


def barrier(backend: Backend, name: str) -> tf.Tensor:
    """Wait for all ranks, in a compiled function. Collective."""
    return backend.all_reduce(tf.zeros([]), name=f"async//{name}")


def _copy_of(variable: Any, *, placeholder: bool) -> Any:
    """Return a variable for the optimizer, with the name by which it finds out what decays.

    A placeholder has as many dims, which optimizers look at, and one element: Keras' EMA fails for none.
    """
    one = tf.zeros([1] * (len(variable.shape) or 1), variable.dtype)
    value = one if placeholder else tf.identity(unwrap(variable))
    master = keras.Variable(value, dtype=variable.dtype, trainable=True, autocast=False, name=variable.name)
    rename(master, variable.path)
    master.constraint = variable.constraint
    return master
