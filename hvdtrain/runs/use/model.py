"""The trained model of a run, restored from a checkpoint on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.backends.protocol import Backend
from hvdtrain.config.run import Config
from hvdtrain.data.batch import Batch
from hvdtrain.runs.description import RunDescription
from hvdtrain.runs.trainers import trainer_for
from hvdtrain.training.evaluation.predict import build_for

ANY_STEPS = 10**9
"""Steps of a learning rate's schedule that nothing is trained with."""


@contextmanager
def trained_model(
    config: Config, description: RunDescription, folder: Path, which: str, backend: Backend, like: Batch
) -> Iterator[Any]:
    """Yield the model as it is evaluated in training: with the averages of its weights, where there are any.

    Args:
        config: of the run.
        description: of the run.
        folder: of the run's checkpoints, or one of them.
        which: `newest`, `best`, or the number of a step.
        backend: the ranks; every rank calls this.
        like: a batch of its inputs.

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
