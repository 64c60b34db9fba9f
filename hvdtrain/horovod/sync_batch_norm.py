"""Horovod's synchronized batch normalization, by its own arguments."""

from typing import Any

from hvdtrain.backends.protocol import Collectives
from hvdtrain.config.errors import ConfigError
from hvdtrain.horovod.basics import global_process_set, is_elastic, size
from hvdtrain.horovod.exchange import exchange_among
from hvdtrain.horovod.flavour import keras, layers


@keras.saving.register_keras_serializable(package="horovod")
class SyncBatchNormalization(layers.SyncBatchNormalization):
    """Batch normalization with the statistics of all ranks' samples.

    Besides `fused`, which must be False, the arguments are those of `tf.keras.layers.BatchNormalization`. Other than
    Horovod's it weighs the ranks by their samples, and it may be used with a mask.
    """

    def __init__(self, fused: bool | None = False, **kwargs: Any) -> None:
        if fused in (True, None):
            raise ConfigError("SyncBatchNormalization does not support fused=True.")
        super().__init__(**kwargs)

    def replicas(self) -> Collectives | None:
        """Return the exchange among all ranks, None where there is one; ranks that may come need it in any case."""
        if self.exchange is not None:
            return super().replicas()
        return exchange_among(global_process_set) if is_elastic() or size() > 1 else None
