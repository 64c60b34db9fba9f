"""Options of the model."""

from dataclasses import field
from typing import Literal

from hvdtrain.config.section import section

Scalar = bool | int | float | str
OutputKind = Literal["logits", "probabilities", "binary_logits", "binary_probabilities", "values"]
"""What a model returns: logits or probabilities of the classes, those of the label 1, or values."""

EmbeddingSharding = Literal["none", "table", "row", "column"]
"""How embedding tables are divided among ranks: not at all, whole tables to ranks, by rows, or by columns."""


@section
class ModelConfig:
    """The model, its loss and its metrics."""

    model: str = "small_cnn"
    """Name of a model family, or PACKAGE.MODULE:FUNCTION of your own, which returns a Keras model."""
    model_args: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's builder, as NAME VALUE pairs."""
    loss: str | None = None
    """Keras name of the loss, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.loss."""
    metrics: tuple[str, ...] | None = None
    """Keras names of metrics, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.metrics."""
    embedding_sharding: EmbeddingSharding = "none"
    """Divide the model's embedding tables among the ranks along ep: whole tables, their rows, or their columns."""
    sequence_parallel: bool = False
    """With --parallel tp=N: keep activations between blocks as slices of the sequence; less memory, as many bytes."""
