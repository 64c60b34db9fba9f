"""Update rules by the option that selects them; default: all-reduce."""

from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.registry import resolve
from hvdtrain.training.options import StepOptions
from hvdtrain.training.update_rules.base import UpdateRule

DEFAULT = "all_reduce"
ZERO = {
    1: "hvdtrain.training.update_rules.zero.stage1:ZeroUpdate",
    2: "hvdtrain.training.update_rules.zero.stage2:ScatteredGradientsUpdate",
    3: "hvdtrain.training.update_rules.zero.stage3:ShardedParametersUpdate",
}
"""Value of `zero` -> rule."""
RULES = {
    DEFAULT: "hvdtrain.training.update_rules.all_reduce:AllReduceUpdate",
    "zero": ZERO[1],
    **dict.fromkeys(
        ("average_fragments", "average_delay", "average_blend", "average_bits"),
        "hvdtrain.training.update_rules.streaming:StreamingUpdate",
    ),
    "local": "hvdtrain.training.update_rules.local_sgd:LocalUpdate",
    "async": "hvdtrain.training.update_rules.servers.rule:AsyncUpdate",
    "hybrid": "hvdtrain.training.update_rules.servers.hybrid:HybridUpdate",
    "gossip": "hvdtrain.training.update_rules.servers.peers:GossipUpdate",
    "easgd": "hvdtrain.training.update_rules.servers.peers:ElasticUpdate",
    "local_steps": "hvdtrain.training.update_rules.local_sgd:LocalUpdate",
}
"""Option of `UpdateConfig`, or value of `update`, -> rule, imported only when selected; the first one that is set."""


def chosen_rule(options: StepOptions) -> str:
    """Return the name of the rule selected by `options`."""
    chosen = {options.update, *options.chosen()} - {DEFAULT}
    return next((option for option in RULES if option in chosen), DEFAULT)


def update_rule_for(backend: Backend, model: Any, optimizer: Any, options: StepOptions) -> UpdateRule:
    """Return the rule selected by `options`, with the optimizer built; one replica has the default.

    Raises ConfigError for an optimizer that does not fit the rule.
    """
    name = DEFAULT if is_alone(backend) else chosen_rule(options)
    return _rule_class(name, options)(backend, model, optimizer, options)


def _rule_class(name: str, options: StepOptions) -> type[UpdateRule]:
    stage = {"zero": ZERO[options.zero]} if options.zero else {}
    rule: type[UpdateRule] = resolve("update rule", name, {**RULES, **stage})
    return rule


def builds_sharded(options: StepOptions, backend: Backend) -> bool:
    """Return whether the model is built sharded (ZeRO-3); not if it would be copied."""
    whole = is_alone(backend) or options.sync_batch_norm or bool(set(backend.axes) - {"dp"})
    return options.zero == 3 and not whole


def is_alone(backend: Backend) -> bool:
    """Return whether there is only one replica."""
    return backend.size == 1
