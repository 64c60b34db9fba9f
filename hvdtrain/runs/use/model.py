"""The trained model of a run, restored from a checkpoint on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.trainers import ANY_STEPS, trainer_for
from hvdtrain.training.evaluation.predict import build_for


def readable_outputs(outputs: Any, description: RunDescription) -> Any:
    """Return probabilities [samples, classes] where the model has classes, else the outputs as they are.

    They are of two classes for a binary model with one output.
    """
    if not isinstance(outputs, np.ndarray) or description.outputs == "values":
        return outputs
    array = outputs.astype(np.float64)
    if description.outputs == "logits":
        return softmax(array).astype(np.float32)
    if description.outputs == "binary_logits":
        array = 1.0 / (1.0 + np.exp(-np.clip(array, -700, 700)))
    if description.outputs.startswith("binary") and (array.ndim == 1 or array.shape[-1] == 1):
        of_one = array.reshape(len(array), -1)[:, :1]
        array = np.concatenate([1.0 - of_one, of_one], axis=1)
    return array.astype(np.float32)


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities [..., classes] of `logits`."""
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    total: np.ndarray = shares / shares.sum(axis=-1, keepdims=True)
    return total


def has_one_class(outputs: Any, description: RunDescription) -> bool:
    """Whether each row of readable `outputs` is a distribution over classes, of which one is predicted."""
    several_labels = description.outputs.startswith("binary") and outputs_width(outputs) != 2
    return description.outputs != "values" and outputs_width(outputs) > 1 and not several_labels


def outputs_width(outputs: Any) -> int:
    """Return the length of rows [samples, n]; 0 for anything else."""
    return outputs.shape[1] if isinstance(outputs, np.ndarray) and outputs.ndim == 2 else 0


@contextmanager
def trained_model(
    config: Config, description: RunDescription, folder: Path, which: str, backend: Backend, like: Batch
) -> Iterator[Any]:
    """Yield the model as it is evaluated in training: with the averages of its weights, where there are any.

    Collective. `folder` holds the run's checkpoints, or is one of them; `which` is `newest`, `best`, or the number of a
    step; `like` is a batch of the model's inputs.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit the configuration.
    """
    trainer = trainer_for(
        config, shape=description.sample_shape, classes=description.classes, backend=backend, steps=ANY_STEPS
    )
    build_for(trainer.model, [like])
    trainer.restore(folder, which)
    trainer.broadcast_state()
    trainer.rule.consolidate()
    with trainer.averaged_weights():
        yield trainer.model
