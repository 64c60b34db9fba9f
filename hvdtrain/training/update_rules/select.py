"""The update rules by the option that chooses them; without one of them gradients are all-reduced."""

from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.registry import resolve
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.base import UpdateRule

RULES = {
    "all_reduce": "hvdtrain.training.update_rules.all_reduce:AllReduceUpdate",
    "zero": "hvdtrain.training.update_rules.zero:ZeroUpdate",
    "local_steps": "hvdtrain.training.update_rules.local_sgd:LocalUpdate",
}
"""The option of `UpdateConfig` that chooses a rule -> the rule, imported only then."""


def update_rule_for(backend: Backend, model: Any, optimizer: Any, options: StepOptions) -> UpdateRule:
    """Return the update rule that `options` choose, with the optimizer built.

    Raises:
        ConfigError: an optimizer or options that do not fit the rule.
    """
    name = next((option for option in RULES if option in options.chosen()), "all_reduce")
    rule: UpdateRule = resolve("update rule", name, RULES)(backend, model, optimizer, options)
    return rule
