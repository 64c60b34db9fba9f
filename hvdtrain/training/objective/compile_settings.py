"""What a model was compiled with, where the trainer is not told anything else."""

from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer

_MARK = "_hvdtrain_compile_config"
"""Keeps the settings with which the trainer itself compiled the model."""
_WITHOUT_EFFECT = {"steps_per_execution": 1, "run_eagerly": False}
"""Settings that nothing here reads, by default. Of `jit_compile` Keras does not keep whether it was asked for."""


@dataclass(frozen=True)
class Objective:
    """What a model is trained for, as `Model.compile` takes it."""

    loss: Any
    metrics: Any = ()
    loss_weights: Any = None
    weighted_metrics: Any = ()


def settle(model: Any, optimizer: Any, given: Objective) -> tuple[Any, Objective, list[str]]:
    """Return optimizer and objective, where they are None those that `model` was compiled with, and what to warn of.

    Loss and loss weights go together, and so do metrics and weighted metrics.

    Args:
        model: a Keras model, compiled or not.
        optimizer: what the trainer was given.
        given: what the trainer was given, with None for metrics of which it was not told.

    Raises:
        ConfigError: there is no optimizer.
    """
    config = getattr(getattr(model, "_compile_config", None), "config", {})
    if optimizer is None:
        optimizer = _optimizer_of(model, config)
    if given.loss is None and given.loss_weights is None:
        given = replace(given, loss=config.get("loss"), loss_weights=config.get("loss_weights"))
    if given.metrics is None and given.weighted_metrics is None:
        given = replace(given, metrics=config.get("metrics"), weighted_metrics=config.get("weighted_metrics"))
    given = replace(given, metrics=given.metrics or (), weighted_metrics=given.weighted_metrics or ())
    notes = [] if not config or _is_trainers(model) else _notes(model, config, optimizer, given)
    return optimizer, given, notes


def compile_for_trainer(model: Any, optimizer: Any, objective: Objective) -> None:
    """Compile `model`, which is trained otherwise, for callbacks and steps that look at what it was compiled with."""
    model.compile(
        optimizer,
        objective.loss,
        loss_weights=objective.loss_weights,
        metrics=_listed(objective.metrics),
        weighted_metrics=_listed(objective.weighted_metrics),
        jit_compile=False,
        auto_scale_loss=False,
    )
    setattr(model, _MARK, getattr(model, "_compile_config", None))


def _is_trainers(model: Any) -> bool:
    mark = getattr(model, _MARK, None)
    return mark is not None and mark is getattr(model, "_compile_config", None)


def _optimizer_of(model: Any, config: dict[str, Any]) -> Any:
    if not config:
        raise ConfigError(
            "An optimizer is needed: Trainer(model, optimizer, loss), or a model that was compiled with one. "
            "Received: None."
        )
    # Not the one that compile() was given: Keras may have wrapped it, and restored the state of the whole.
    optimizer = model.optimizer
    around = _is_trainers(model) and isinstance(optimizer, DistributedOptimizer)
    return optimizer.inner_optimizer if around else optimizer


def _notes(model: Any, config: dict[str, Any], optimizer: Any, used: Objective) -> list[str]:
    unused = [name for name, value in vars(used).items() if config.get(name) and not _same(value, config[name])]
    if optimizer is not model.optimizer and optimizer is not config.get("optimizer"):
        unused = ["optimizer", *unused]
    idle = [f"{name}={config[name]}" for name, plain in _WITHOUT_EFFECT.items() if config.get(name, plain) != plain]
    lines = []
    if unused:
        names = ", ".join(unused)
        lines.append(f"warning: Trainer was given others than the model was compiled with, and uses them: {names}.")
    if idle:
        lines.append(f"warning: settings that the model was compiled with have no effect here: {', '.join(idle)}.")
    return lines


def _same(used: Any, compiled: Any) -> bool:
    """Tell whether two settings are visibly one: of different objects nobody knows."""
    return used is compiled or (isinstance(used, str | list | tuple | dict) and used == compiled)


def _listed(given: Any) -> Any:
    """Return metrics as `compile` takes them."""
    if isinstance(given, list | tuple):
        return list(given) or None
    return given if isinstance(given, dict) or given is None else [given]
