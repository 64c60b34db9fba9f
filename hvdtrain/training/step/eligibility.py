"""Whether code of a model's own computes with the whole batch, and what is said where it cannot."""

from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.data.batch import Batch
from hvdtrain.layers.exchanging import exchanging_layers
from hvdtrain.training.options import StepOptions
from hvdtrain.training.step.own_code import has_own_code, own_parts

MOST_NAMES = 5


def sees_whole_batch(backend: Backend, model: Any, options: StepOptions) -> bool:
    """Return whether the steps of a model compute with the whole batch, of which each rank has rows.

    Where no code but Keras' own forms numbers of the samples, the weights of gradients say as much. On one rank it
    concerns microbatches alone, each of which is a batch of its own.
    """
    if not options.whole_batch or (backend.size == 1 and options.accumulate == 1):
        return False
    return not _obstacle(backend, model, options) and has_own_code(model)


def _obstacle(backend: Backend, model: Any, options: StepOptions, *, has_rows: bool = True) -> str:
    """Return what keeps steps from the whole batch, for messages."""
    axes = sorted(set(backend.axes) - {"dp"})
    if backend.name not in ("horovod", "single"):
        return opt("backend", backend.name)
    ways = {"jit": False, "update": "all_reduce", "local_steps": None, "reduce_op": "average"}
    for name, default in ways.items():
        if getattr(options, name) != default:
            return opt(name, getattr(options, name))
    if axes:
        return f"{', '.join(axes)} of {opt('parallel')}"
    if exchanging := exchanging_layers(model):
        return f"{type(exchanging[0]).__name__} {exchanging[0].name!r}, which exchanges by itself"
    return "" if has_rows else "ragged or sparse inputs, or inputs of several lengths"


def refuse_own_step(backend: Backend, model: Any, options: StepOptions, *, has_rows: bool) -> None:
    """Reject a step of a model's own that cannot compute with the whole batch. Raises ConfigError."""
    obstacle = _obstacle_between_replicas(backend, model, options, has_rows=has_rows)
    if obstacle:
        raise ConfigError(
            f"The step of {type(model).__name__} is its own, and computes with the samples of all ranks: not with "
            f"{obstacle}. Leave that out, or pass {opt('whole_batch', False)}: each rank computes it for its own "
            "samples then, and gradients and numbers are averaged by samples, also where the step forms sums."
        )


def warning_of_own_parts(backend: Backend, model: Any, options: StepOptions, *, has_rows: bool) -> str:
    """Return a warning of losses, metrics and layers that compute with each replica's samples alone, or nothing."""
    obstacle = _obstacle_between_replicas(backend, model, options, has_rows=has_rows)
    parts = own_parts(model) if obstacle else []
    if not parts:
        return ""
    more = f" and {len(parts) - MOST_NAMES} more" if len(parts) > MOST_NAMES else ""
    return (
        f"warning: with {obstacle}, each rank computes {', '.join(parts[:MOST_NAMES])}{more} for its own samples: sums "
        f"over the batch, statistics of it and comparisons of samples are a rank's. {opt('whole_batch', False)} says "
        "that this is meant."
    )


def _obstacle_between_replicas(backend: Backend, model: Any, options: StepOptions, *, has_rows: bool) -> str:
    wanted = options.whole_batch and backend.size > 1
    return _obstacle(backend, model, options, has_rows=has_rows) if wanted else ""


def has_rows(batch: Batch) -> bool:
    """Return whether all tensors of a batch have a row for each sample.

    They have not if they are ragged or sparse, or as the nodes and edges of graphs, of which each rank has its own.
    """
    tensors = [t for t in tf.nest.flatten((batch.inputs, batch.targets, batch.sample_weight)) if t is not None]
    if not all(isinstance(each, tf.Tensor | np.ndarray) and len(each.shape) for each in tensors):
        return False
    return len({each.shape[0] for each in tensors} - {None}) <= 1
