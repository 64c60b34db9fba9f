"""Elastic training with Keras: state, and the callbacks that commit and update it."""

from typing import Any

from hvdtrain.compat.horovod import keras_elastic_callbacks
from hvdtrain.horovod.elastic import TensorFlowKerasState, run
from hvdtrain.horovod.keras.callbacks import Callback

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(TensorFlowKerasState):
    """A Keras model, its optimizer (the compiled one if None), and further properties that become attributes."""

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        super().__init__(model, optimizer, **kwargs)


_callbacks: Any = keras_elastic_callbacks()


class CommitStateCallback(_callbacks.CommitStateCallbackImpl, Callback):
    """Commits `state` every `batches_per_commit` batches, and at the end of each epoch."""

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__(None, state, batches_per_commit)


class UpdateBatchStateCallback(_callbacks.UpdateBatchStateCallbackImpl, Callback):
    """Sets `state.batch` to the number of the last batch, and to 0 after an epoch.

    Keras takes the number of steps from the data, so the first epoch after a reset is a full one.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(None, state)


class UpdateEpochStateCallback(_callbacks.UpdateEpochStateCallbackImpl, Callback):
    """Sets `state.epoch` to the number of finished epochs, over all resets."""

    def __init__(self, state: Any) -> None:
        super().__init__(None, state)
