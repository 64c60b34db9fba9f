"""Options of the exchange of gradients between the ranks."""

import math
from typing import Literal, get_args

from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.section import section

ReduceOpName = Literal["average", "sum", "adasum"]
CompressionName = Literal["none", "fp16", "bf16"]
SparseName = Literal["auto", "gather", "dense"]


@section
class ExchangeConfig:
    """How gradients are reduced over the ranks, and how they travel."""

    reduce_op: ReduceOpName = "average"
    """average over the global batch; sum: that times the ranks; adasum: scale-invariant, needs MPI and 2^n ranks."""
    compression: CompressionName = "none"
    """Gradients on the wire: in 32 bits, or in 16 with sums in 32."""
    sparse_gradients: SparseName = "auto"
    """Gradients of embeddings: gather rows, or reduce the dense table; auto moves fewer bytes."""
    gradient_groups: int = 0
    """Number of groups in which gradients are sent; 0: each as soon as it is computed."""
    predivide: float = 1.0
    """Divide gradients by this before the sum, and the rest after it."""

    def __post_init__(self) -> None:
        choices = {
            opt("reduce_op"): (self.reduce_op, ReduceOpName),
            opt("compression"): (self.compression, CompressionName),
        }
        for option, (value, names) in choices.items():
            if value not in get_args(names):
                raise ConfigError(f"{option} must be one of {', '.join(get_args(names))}. Received: {value!r}.")
        if self.gradient_groups < 0:
            raise ConfigError(f"{opt('gradient_groups')} must not be negative. Received: {self.gradient_groups}.")
        if not (math.isfinite(self.predivide) and self.predivide > 0):
            raise ConfigError(f"{opt('predivide')} must be a positive number. Received: {self.predivide}.")
        if self.reduce_op == "adasum":
            self._check_adasum()

    def _check_adasum(self) -> None:
        """Refuse options that Adasum's formula does not allow."""
        unfit = {
            opt("compression"): self.compression != "none",
            opt("gradient_groups"): self.gradient_groups > 0,
            opt("predivide"): self.predivide != 1.0,
            opt("sparse_gradients", "gather"): self.sparse_gradients == "gather",
        }
        for option, used in unfit.items():
            if used:
                raise ConfigError(
                    f"{opt('reduce_op', 'adasum')} reduces each whole gradient by itself: leave out {option}."
                )
