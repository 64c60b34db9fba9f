"""Settings of a compiled model, used as defaults of the trainer's arguments."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.compat.keras import compile_arguments, drop_compile_metrics, last_compile
from hvdtrain.config.errors import ConfigError
from hvdtrain.gradients.distributed_optimizer import DistributedOptimizer
from hvdtrain.models.objective import known_losses, known_metrics, nearest
from hvdtrain.optim.averaging import innermost
from hvdtrain.optim.optimizers import NoOptimizer
from hvdtrain.state.optimizers import optimizers_of

SHAPED = ("accuracy", "acc", "crossentropy", "ce")
"""Names that Keras resolves by the shapes of targets and outputs."""
_MARK = "_hvdtrain_compile_config"
"""Attribute with the settings of the trainer's own `compile`."""
_WITHOUT_EFFECT = {"run_eagerly": False}
"""Defaults of ignored settings. Keras does not record whether `jit_compile` was requested."""


@dataclass(frozen=True)
class Objective:
    """Losses and metrics, as for `Model.compile`."""

    loss: Any
    metrics: Any = ()
    loss_weights: Any = None
    weighted_metrics: Any = ()


def merge_compile_settings(model: Any, optimizer: Any, chosen: Objective) -> tuple[Any, Objective, list[str]]:
    """Fill in optimizer and objective from `model.compile`; also return warnings.

    Loss and loss weights go together, and so do metrics and weighted metrics; omitted metrics are None.
    """
    config = compile_arguments(model)
    if optimizer is None:
        optimizer = _optimizer_of(model, config)
    if chosen.loss is None and chosen.loss_weights is None:
        chosen = replace(chosen, loss=config.get("loss"), loss_weights=config.get("loss_weights"))
    if chosen.metrics is None and chosen.weighted_metrics is None:
        chosen = replace(chosen, metrics=config.get("metrics"), weighted_metrics=config.get("weighted_metrics"))
    chosen = replace(chosen, metrics=chosen.metrics or (), weighted_metrics=chosen.weighted_metrics or ())
    notes = [] if not config or _is_trainers(model) else _notes(model, config, optimizer, chosen)
    return optimizer, chosen, notes


def compile_for_trainer(model: Any, optimizer: Any, objective: Objective) -> None:
    """Compile `model`, unless it is compiled with these objects, or there is nothing to compile it with.

    Raises ConfigError for an unknown name.
    """
    _check_names(objective)
    config = compile_arguments(model)
    asked = vars(objective).items()
    held = all(config.get(name) is value or (_is_empty(value) and _is_empty(config.get(name))) for name, value in asked)
    if isinstance(innermost(optimizer), NoOptimizer):
        if held:
            return
        optimizer = None
    if model.compiled and model.optimizer is optimizer and held:
        return
    drop_compile_metrics(model)
    model.compile(
        optimizer,
        objective.loss,
        loss_weights=objective.loss_weights,
        metrics=_listed(objective.metrics),
        weighted_metrics=_listed(objective.weighted_metrics),
        steps_per_execution=model.steps_per_execution,
        jit_compile=False,
        auto_scale_loss=False,
    )
    setattr(model, _MARK, last_compile(model))


def _is_empty(setting: Any) -> bool:
    return setting is None or (isinstance(setting, list | tuple | dict) and not setting)


def _is_trainers(model: Any) -> bool:
    mark = getattr(model, _MARK, None)
    return mark is not None and mark is last_compile(model)


def _optimizer_of(model: Any, config: dict[str, Any]) -> Any:
    # Not the argument of compile(): Keras may have wrapped it, and restored the state of the wrapper.
    optimizer = (model.optimizer or next(iter(optimizers_of(model).values()), None)) if config else None
    if optimizer is None:
        return NoOptimizer()
    around = _is_trainers(model) and isinstance(optimizer, DistributedOptimizer)
    return optimizer.inner_optimizer if around else optimizer


def refuse_no_optimizer(model: Any, optimizer: Any) -> None:
    """Raise ConfigError if `optimizer` is a stand-in, wrapped or not."""
    if not isinstance(innermost(optimizer), NoOptimizer):
        return
    if not compile_arguments(model):
        raise ConfigError(
            "An optimizer is needed: Trainer(model, optimizer, loss), or a model that was compiled with one. "
            "Received: None."
        )
    raise ConfigError(
        f"An optimizer is needed: {type(model).__name__} was compiled with none, and holds none in its attributes. "
        "Received: None. Pass Trainer(model, optimizer), or set one in compile()."
    )


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


@contextmanager
def compiled_code(model: Any, *, eager: bool) -> Iterator[None]:
    """Raise ConfigError with the cure where code inside the context fails that was written for `eager` steps."""
    try:
        yield
    except (AttributeError, NotImplementedError, TypeError) as error:
        if not eager or not _EAGER.search(str(error)):
            raise
        raise ConfigError(
            f"{type(model).__name__} {model.name!r} was compiled with run_eagerly=True, and steps are compiled "
            f"functions here, in which NumPy code cannot run. Received: {error}. Wrap that code in "
            "tf.numpy_function(function, [tensor, …], Tout=tf.float32), or write it in operations of keras.ops."
        ) from error


_EAGER = re.compile(r"symbolic|has no attribute 'numpy'|KerasTensor|numpy\(\)", re.IGNORECASE)
"""What errors say of a tensor without a value."""


def _same(used: Any, compiled: Any) -> bool:
    """Return whether two settings are equal; False for distinct objects."""
    return used is compiled or (isinstance(used, str | list | tuple | dict) and used == compiled)


def _check_names(objective: Objective) -> None:
    for kind, names, get, known in (
        ("loss", objective.loss, keras.losses.get, known_losses),
        ("metric", (objective.metrics, objective.weighted_metrics), keras.metrics.get, known_metrics),
    ):
        for name in tf.nest.flatten(names):
            if not isinstance(name, str) or name.lower() in SHAPED:
                continue
            try:
                get(name)
            except TypeError as error:
                raise ConfigError(f"The {kind} {name!r} needs arguments ({error}): give an object of it.") from error
            except ValueError as error:
                raise ConfigError(f"Unknown {kind} {name!r}.{nearest(name, known())}") from error


def _listed(metrics: Any) -> Any:
    """Return metrics in the form of `compile`."""
    if isinstance(metrics, list | tuple):
        return list(metrics) or None
    return metrics if isinstance(metrics, dict) or metrics is None else [metrics]
