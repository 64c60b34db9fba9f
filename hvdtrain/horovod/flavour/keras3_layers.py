"""The layer of Keras 3 that the face's synchronized batch normalization is made of."""

from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
