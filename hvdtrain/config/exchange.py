"""Options of the exchange of gradients between the ranks."""

import math
from typing import Literal, get_args

from hvdtrain.config.errors import ConfigError
from hvdtrain.config.section import section

ReduceOpName = Literal["average", "sum", "adasum"]
CompressionName = Literal["none", "fp16", "bf16"]
SparseName = Literal["auto", "gather", "dense"]


@section
class ExchangeConfig:
    """What is made of the ranks' gradients, and how they travel."""

    reduce_op: ReduceOpName = "average"
    """average: of the whole batch; sum: that times the ranks; adasum: scale-invariant, needs MPI and 2^n ranks."""
    compression: CompressionName = "none"
    """Bits of a gradient's element on the wire: 32, or 16 with the sum formed in 32."""
    sparse_gradients: SparseName = "auto"
    """Rows of embeddings: gathered, or the table made dense; auto does what moves fewer bytes."""
    gradient_groups: int = 0
    """Gradients leave in so many groups; 0 lets each leave as soon as it is there."""
    predivide: float = 1.0
    """Divide gradients by this before the sum, and the rest after it."""

    def __post_init__(self) -> None:
        choices = {"--reduce-op": (self.reduce_op, ReduceOpName), "--compression": (self.compression, CompressionName)}
        for option, (value, names) in choices.items():
            if value not in get_args(names):
                raise ConfigError(f"{option} must be one of {', '.join(get_args(names))}. Received: {value!r}.")
        if self.gradient_groups < 0:
            raise ConfigError(f"--gradient-groups must not be negative. Received: {self.gradient_groups}.")
        if not (math.isfinite(self.predivide) and self.predivide > 0):
            raise ConfigError(f"--predivide must be a positive number. Received: {self.predivide}.")
        if self.reduce_op == "adasum":
            self._check_adasum()

    def _check_adasum(self) -> None:
        """Refuse what Adasum's formula, which takes each gradient as it is, leaves no room for."""
        unfit = {
            "--compression": self.compression != "none",
            "--gradient-groups": self.gradient_groups > 0,
            "--predivide": self.predivide != 1.0,
            "--sparse-gradients gather": self.sparse_gradients == "gather",
        }
        for option, used in unfit.items():
            if used:
                raise ConfigError(f"--reduce-op adasum reduces each whole gradient by itself: leave out {option}.")
