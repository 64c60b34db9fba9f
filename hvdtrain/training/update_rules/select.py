"""The update rules by the option that chooses them; without one of them gradients are all-reduced."""

from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.registry import resolve
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.base import UpdateRule

DEFAULT = "all_reduce"
RULES = {
    DEFAULT: "hvdtrain.training.update_rules.all_reduce:AllReduceUpdate",
    "zero": "hvdtrain.training.update_rules.zero.stage1:ZeroUpdate",
    "local_steps": "hvdtrain.training.update_rules.local_sgd:LocalUpdate",
}
"""The option of `UpdateConfig` that chooses a rule -> the rule, imported only then."""


def chosen_rule(options: StepOptions) -> str:
    """Return the name of the rule that `options` choose."""
    chosen = options.chosen()
    return next((option for option in RULES if option in chosen), DEFAULT)


def check_rule(options: StepOptions, optimizer: Any, backend: Backend | None = None) -> None:
    """Refuse what the chosen rule cannot work with, on the mesh of `backend` if it is given.

    Raises:
        ConfigError: naming the option, the optimizer or the axis of the mesh.
    """
    rule = _rule_class(chosen_rule(options), options)
    rule.check(options, optimizer)
    if backend is not None and not is_alone(backend):
        rule.check_axes(backend.axes)


def update_rule_for(backend: Backend, model: Any, optimizer: Any, options: StepOptions) -> UpdateRule:
    """Return the update rule that `options` choose, with the optimizer built; one replica has the default.

    Raises:
        ConfigError: an optimizer that does not fit the rule.
    """
    name = DEFAULT if is_alone(backend) else chosen_rule(options)
    return _rule_class(name, options)(backend, model, optimizer, options)


def _rule_class(name: str, options: StepOptions) -> type[UpdateRule]:
    rule: type[UpdateRule] = resolve("update rule", name, RULES)
    return rule.variant(options)


def starts_as_slices(options: StepOptions, backend: Backend) -> bool:
    """Return whether a function that builds the model makes slices of its parameters; a copy of it would need them
    whole.
    """
    whole = is_alone(backend) or options.sync_batch_norm or bool(set(backend.axes) - {"dp"})
    return options.zero == 3 and not whole


def is_alone(backend: Backend) -> bool:
    """Return whether there is nobody to share the update with."""
    return backend.size == 1
