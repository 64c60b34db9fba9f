"""Horovod's synchronized batch normalization, with its arguments."""

from typing import Any

from hvdtrain.backends.protocol import Collectives
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.flavour import keras, layers
from hvdtrain.horovod.names import Sum, global_process_set, rank, size
from hvdtrain.runtime.process_sets import collectives_among, is_elastic

__all__ = ["Sum", "SyncBatchNormalization", "rank", "size"]


@keras.saving.register_keras_serializable(package="horovod")
class SyncBatchNormalization(layers.SyncBatchNormalization):
    """Batch normalization with statistics over all ranks.

    Arguments are those of `tf.keras.layers.BatchNormalization`, and `fused`, which must be False. Unlike Horovod's, it
    weights ranks by their number of samples, and supports masks.
    """

    fused = False

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ConfigError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)

    def replicas(self) -> Collectives | None:
        """Return the collectives among all ranks; None if there is one rank and the job is not elastic."""
        if self.exchange is not None:
            return super().replicas()
        return collectives_among(global_process_set) if is_elastic() or size() > 1 else None
