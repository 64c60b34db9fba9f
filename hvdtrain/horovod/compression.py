"""Gradient compression, as `horovod.tensorflow.compression`: Horovod's own classes."""

from horovod.tensorflow.compression import Compression, Compressor, FP16Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
