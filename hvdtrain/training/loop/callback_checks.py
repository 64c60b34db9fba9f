"""Keras callbacks that cannot work here, or not with this training."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, opt

_callbacks = keras.callbacks


def check_callback(callback: Any) -> None:
    """Refuse what cannot work here in any training.

    Raises:
        ConfigError: saying why.
    """
    if isinstance(callback, _callbacks.BackupAndRestore):
        raise ConfigError(
            "BackupAndRestore would restore rank 0 alone here: Trainer.fit takes it, or trainer.resume(folder) before "
            "training goes on from a checkpoint."
        )
    if isinstance(callback, _callbacks.SwapEMAWeights):
        raise ConfigError(
            "SwapEMAWeights is not needed: where the optimizer keeps averages (use_ema=True), it is they that are "
            "evaluated and predict."
        )
    if not isinstance(callback, _callbacks.Callback):
        raise ConfigError(f"callbacks must be keras.callbacks.Callback objects. Received: {callback!r}.")


def refuse_saves_within_epochs(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that save the model after batches, where each replica's weights are its own by then.

    Raises:
        ConfigError: naming the callback.
    """
    for callback in tf.nest.flatten(list(callbacks)):
        if isinstance(callback, _callbacks.ModelCheckpoint) and callback.save_freq != "epoch":
            raise ConfigError(
                f"ModelCheckpoint(save_freq={callback.save_freq}) would save rank 0's own weights, which "
                f"{opt('local_steps')} "
                'averages later: use save_freq="epoch".'
            )


def refuse_copies_of_slices(callbacks: Sequence[Any], *, saves: bool) -> None:
    """Refuse callbacks that would keep a rank's slices of a split model as if they were the model.

    Args:
        callbacks: what `Model.fit` takes.
        saves: whether checkpoints are written, which cannot take them.

    Raises:
        ConfigError: naming the callback.
    """
    for callback in tf.nest.flatten(list(callbacks)):
        if isinstance(callback, _callbacks.ModelCheckpoint):
            raise ConfigError(
                f"{type(callback).__name__} would write the slices of one rank, and the model is split among several: "
                "write checkpoints by fit(checkpoint=…) or --checkpoint-every, and a whole file from one of them by "
                "python -m hvdtrain checkpoint export."
            )
        if saves and isinstance(callback, _callbacks.EarlyStopping) and callback.restore_best_weights:
            raise ConfigError(
                f"{type(callback).__name__}(restore_best_weights=True) keeps weights of which each rank has slices, "
                "and checkpoints cannot take these yet: leave it out; --keep-best keeps the best checkpoint."
            )
