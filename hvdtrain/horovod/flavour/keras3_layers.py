"""The Keras 3 base class of the face's synchronized batch normalization."""

from hvdtrain.layers.sync_batch_norm import SyncBatchNormalization

__all__ = ["SyncBatchNormalization"]
