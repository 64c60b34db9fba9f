"""Verify equal calls on all ranks, and unchanged data on resume."""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend, gather
from hvdtrain.compat.keras import function_of_loss
from hvdtrain.config.checkpoint import Checkpoint
from hvdtrain.config.errors import CheckpointError
from hvdtrain.data.identity import Identity
from hvdtrain.data.pipeline import SourceTraining, TrainingData
from hvdtrain.data.source import Source
from hvdtrain.data.streams.rank_parts import RankTraining
from hvdtrain.optim.averaging import innermost
from hvdtrain.runtime.control.agreement import check_same_call, encode_call
from hvdtrain.training.callbacks.keras_callbacks import that_change_training
from hvdtrain.training.compile_settings import Objective
from hvdtrain.training.options import StepOptions
from hvdtrain.training.plan import Plan


def agree_on_call(
    backend: Backend, call: str, arguments: Mapping[str, Any], settings: Mapping[str, str] | None = None
) -> None:
    """Verify that all ranks make this call with equal arguments. Collective.

    For data, only the kind is compared; `settings` come from `settings_of`. Raises ConfigError, the same on every rank,
    with the differing names, values and ranks.
    """
    if backend.job_size == 1:
        return
    told = {name: _described(value) for name, value in arguments.items()}
    facts = encode_call(call, {**told, **(settings or {})})
    check_same_call(backend.gather_bytes(facts, timeout=None), call)


def settings_of(
    seed: int, options: StepOptions, optimizer: Any, objective: Objective, callbacks: Sequence[Any]
) -> dict[str, str]:
    """Return the trainer's settings that all ranks share, by name."""
    return {
        "Trainer(seed=…)": str(seed),
        **{f"Trainer({name}=…)": repr(_plain(value)) for name, value in options.chosen().items()},
        **{f"Trainer({name}=…)": _settings_of_parts(value) for name, value in vars(objective).items()},
        **_settings_of_optimizer(innermost(optimizer)),
        "the callbacks that set weights or rates": that_change_training(callbacks),
    }


def _described(value: Any) -> str:
    """Return repr(value) for plain values, and the kind of others' data."""
    value = _plain(value)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, Plan):
        return repr(Plan(**{name: _plain(each) for name, each in vars(value).items()}))
    if isinstance(value, Checkpoint):
        return repr(value)
    if isinstance(value, Mapping) and not any(hasattr(each, "shape") and each.shape for each in value.values()):
        return repr(sorted(((_plain(key), _plain(each)) for key, each in value.items()), key=str))
    if isinstance(value, tf.data.Dataset):
        return "a Dataset"
    if isinstance(value, keras.utils.PyDataset):
        return "a PyDataset"
    if inspect.isgenerator(value):
        return "a generator"
    return "a function" if callable(value) else "arrays"


def _plain(value: Any) -> Any:
    """Convert a NumPy scalar to Python."""
    return value.item() if isinstance(value, np.generic) else value


def _settings_of_parts(parts: Any) -> str:
    """Describe losses, metrics or weights of outputs, in any structure."""
    if isinstance(parts, Mapping):
        described = (f"{name!r}: {_settings_of_parts(parts[name])}" for name in sorted(parts, key=str))
        return f"{{{', '.join(described)}}}"
    if isinstance(parts, list | tuple):
        return f"[{', '.join(map(_settings_of_parts, parts))}]"
    value = _plain(parts)
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    if not isinstance(value, keras.losses.Loss | keras.metrics.Metric):
        return str(getattr(value, "__name__", type(value).__name__))
    arguments = _numbers(_config_of(value) or {}, "")
    if isinstance(value, keras.losses.Loss):  # Keras' configs leave some out, such as Huber's delta
        arguments |= _numbers(function_of_loss(value)[1], "")
    return f"{type(value).__name__}({', '.join(f'{name}={given}' for name, given in arguments.items())})"


def _config_of(thing: Any) -> dict[str, Any] | None:
    try:
        return dict(thing.get_config())
    except (NotImplementedError, TypeError, ValueError):  # of a class of the user's own
        return None


def _settings_of_optimizer(optimizer: Any) -> dict[str, str]:
    kind = type(optimizer).__name__
    config = _config_of(optimizer)
    if config is None:
        return {"the optimizer": kind}
    # A learning rate that is a number is broadcast.
    if not isinstance(config.get("learning_rate"), dict):
        config.pop("learning_rate", None)
    return {"the optimizer": kind, **_numbers(config, f"{kind}.")}


def _numbers(config: Mapping[str, Any], prefix: str) -> dict[str, str]:
    """Return a Keras config's plain values, also nested, by name, without names, which count up by rank."""
    found: dict[str, str] = {}
    for name, given in config.items():
        value = _plain(given)
        if name == "name":
            continue
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}.")
        elif value is None or isinstance(value, bool | int | float | str):
            found[f"{prefix}{name}"] = repr(value)
    return found


_WORDS = {"steps_per_epoch": "steps per epoch", "batch": "samples per step over all ranks"}


def described(data: TrainingData, seed: int, backend: Backend) -> Identity:
    """Return the fingerprint of `data` that a resumed run must match. Collective.

    Includes the seed of the sample order. For batches of a Dataset or generator: their size and number, as the order is
    the user's. For per-rank data: the number of ranks and each one's data.
    """
    facts: dict[str, Any] = {"batch": data.batch, "steps_per_epoch": data.steps_per_epoch, "seed": seed}
    if isinstance(data, SourceTraining):
        facts["shuffle"] = data.order.shuffle
        facts["samples"] = data.source.size
        facts["fingerprint"] = _fingerprint(data.source)
    if isinstance(data, RankTraining):
        mine = _fingerprint(data.source) or ""
        everyone = gather(backend, mine, timeout=None)
        facts["ranks"] = len(everyone)
        facts["fingerprint"] = hashlib.sha256(" ".join(everyone).encode()).hexdigest()
    return {"training": facts}


def _fingerprint(source: Source | None) -> str | None:
    """Return a fingerprint of all samples, or None."""
    return source.fingerprint().hex() if source is not None and hasattr(source, "fingerprint") else None


def check_same_data(before: Mapping[str, Any] | None, now: Identity | None) -> None:
    """Refuse to resume on other data than `before`, as far as known. Raises CheckpointError naming it."""
    then, today = (before or {}).get("training", {}), (now or {}).get("training", {})
    differing = [name for name in today if then.get(name) is not None and today[name] not in (None, then[name])]
    if not differing:
        return
    name = differing[0]
    if name == "fingerprint":
        what = "samples with other values"
    else:
        what = f"{_WORDS.get(name, name)} {today[name]} now and {then[name]} before"
    raise CheckpointError(
        f"A training resumes with the data and the batch that it began with. Received: {what}. Give fit the same "
        "(batch=N is the size over all ranks), or begin a new training: in another folder, or with restore in place "
        "of resume."
    )
