"""What Keras callbacks remember from epoch to epoch: with it a resumed run decides as an uninterrupted one."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

REMEMBERED = (
    "wait",
    "best",
    "best_epoch",
    "stopped_epoch",
    "cooldown_counter",
    "epochs_since_last_save",
    "_batches_seen_since_last_saving",
)
"""Attributes of EarlyStopping, ReduceLROnPlateau and ModelCheckpoint (and of classes made after them) that change."""


def callback_states(callbacks: Iterable[Any]) -> list[dict[str, Any]]:
    """Return what each of `callbacks` remembers, as JSON takes it.

    A callback with methods `get_state()` and `set_state(state)` decides itself what that is.
    """
    return [_state_of(callback) for callback in callbacks]


def restore_callbacks(callbacks: Iterable[Any], states: Sequence[Mapping[str, Any]]) -> None:
    """Let `callbacks` remember `states`, each what the first one of its class that is left over does.

    Call it after `on_train_begin`, with which Keras' callbacks forget everything.
    """
    left = list(states)
    for callback in callbacks:
        state = next((state for state in left if state["class"] == type(callback).__name__), None)
        if state is not None:
            left.remove(state)
            _restore(callback, state)


def _state_of(callback: Any) -> dict[str, Any]:
    state: dict[str, Any] = {"class": type(callback).__name__}
    if hasattr(callback, "get_state"):
        return state | {"state": callback.get_state()}
    known = {name: getattr(callback, name) for name in REMEMBERED if hasattr(callback, name)}
    state |= {name: _plain(value) for name, value in known.items()}
    if isinstance(history := getattr(callback, "history", None), dict):
        state["history"] = {name: [_plain(value) for value in values] for name, values in history.items()}
        state["epoch"] = [int(epoch) for epoch in callback.epoch]
    return state


def _restore(callback: Any, state: Mapping[str, Any]) -> None:
    if "state" in state:
        callback.set_state(state["state"])
        return
    for name, value in state.items():
        if name != "class":
            setattr(callback, name, value)


def _plain(value: Any) -> Any:
    """Return a number of NumPy's or TensorFlow's as one of Python's."""
    return value if value is None or isinstance(value, bool | int | float | str) else float(value)
