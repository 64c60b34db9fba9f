"""State of Keras callbacks, resumed without changing their decisions."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import keras
import numpy as np

from hvdtrain.config.errors import ConfigError

REMEMBERED = (
    "wait",
    "best",
    "best_epoch",
    "stopped_epoch",
    "cooldown_counter",
    "epochs_since_last_save",
    "_batches_seen_since_last_saving",
)
"""Mutable attributes of EarlyStopping, ReduceLROnPlateau, ModelCheckpoint and similar classes."""


BEST_WEIGHTS = "best_weights"
"""Best weights of EarlyStopping(restore_best_weights=True): a list like `model.get_weights()`."""


def held_weights(callbacks: Iterable[Any], paths: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the best weights held by `callbacks`, as checkpoint tensors by path.

    `0/layers/0/kernel` belongs to the first callback in the list of `callback_states`.
    """
    held: dict[str, np.ndarray] = {}
    for place, callback in enumerate(callbacks):
        weights = getattr(callback, BEST_WEIGHTS, None) if getattr(callback, "restore_best_weights", False) else None
        if weights is not None and len(weights) == len(paths):
            held |= {f"{place}/{path}": np.asarray(array) for path, array in zip(paths, weights, strict=True)}
    return held


def callback_states(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return the state of each callback, JSON-serializable.

    A callback with methods `get_state()` and `set_state(state)` defines its own. For others it is the attributes
    `REMEMBERED` that are numbers, strings or lists of them; other values under these names are ignored.
    """
    return [_state_of(callback) for callback in callbacks]


def restore_callbacks(
    callbacks: Iterable[Any],
    states: Sequence[Mapping[str, Any]],
    held: Mapping[str, np.ndarray] | None = None,
    paths: Sequence[str] = (),
) -> None:
    """Restore the states of `callbacks`, matched by class and order.

    Call it after `on_train_begin`, in which Keras' callbacks reset themselves.

    Args:
        states: result of `callback_states`.
        held: result of `held_weights`.
        paths: structural paths of the model's weights, in order.

    Raises:
        ConfigError: a callback should restore best weights that the checkpoint does not hold.
    """
    left = list(enumerate(states))
    for callback in callbacks:
        found = next(((place, state) for place, state in left if state["class"] == type(callback).__name__), None)
        if found is not None:
            left.remove(found)
            place, state = found
            weights = [(held or {}).get(f"{place}/{path}") for path in paths]
            _restore(callback, state, weights if weights and all(each is not None for each in weights) else None)


def _state_of(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(callback).__name__}
    if _has_own_state(callback):
        return state | {"state": callback.get_state()}
    state |= _plain_ones({name: value for name, value in vars(callback).items() if name in REMEMBERED})
    if isinstance(callback, keras.callbacks.History):
        state |= {"history": _plain_ones(callback.history), "epoch": [int(epoch) for epoch in callback.epoch]}
    return state


def _restore(callback: Any, state: Mapping[str, Any], best_weights: Sequence[Any] | None) -> None:
    if _has_own_state(callback):
        if "state" in state:
            callback.set_state(state["state"])
        return
    if getattr(callback, "restore_best_weights", False) and best_weights is not None:
        setattr(callback, BEST_WEIGHTS, list(best_weights))
    else:
        _refuse_lost_weights(callback, state)
    for name, value in state.items():
        if name not in ("class", "state"):
            setattr(callback, name, value)


def _has_own_state(callback: Any) -> bool:
    return hasattr(callback, "get_state") and hasattr(callback, "set_state")


def _refuse_lost_weights(callback: Any, state: Mapping[str, Any]) -> None:
    """Refuse to resume if Keras would take next epoch's weights for best."""
    if getattr(callback, "restore_best_weights", False) and state.get("best") is not None:
        name = type(callback).__name__
        raise ConfigError(
            f"{name} with restore_best_weights=True cannot resume from this checkpoint, which does not hold the "
            f"weights of its best epoch. Received: a best value of {state['best']}. Pass "
            f"{name}(restore_best_weights=False), and keep the best weights in a file, with "
            "ModelCheckpoint(save_best_only=True)."
        )


def _plain_ones(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values that are None, strings, numbers, or lists of numbers or arrays."""
    plain: dict[str, Any] = {}
    for name, value in values.items():
        with suppress(TypeError, ValueError):
            if isinstance(value, list):
                plain[name] = [each.tolist() if isinstance(each, np.ndarray) else _plain(each) for each in value]
            else:
                plain[name] = _plain(value)
    return plain


def _plain(value: Any) -> Any:
    """Convert a NumPy or TensorFlow number to Python; others raise TypeError or ValueError."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if np.ndim(value):
        raise TypeError("not a single number")
    return float(value)
