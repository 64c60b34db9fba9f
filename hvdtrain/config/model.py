"""Options of the model."""

from dataclasses import field
from typing import Literal

from hvdtrain.config.section import section

Scalar = bool | int | float | str
OutputKind = Literal["logits", "probabilities", "binary_logits", "binary_probabilities", "values"]
"""Model output: class logits or probabilities, those of label 1 (binary), or regression values."""

EmbeddingSharding = Literal["none", "table", "row", "column"]
"""Sharding of embedding tables: none, whole tables per rank, by row, or by column."""


@section
class ModelConfig:
    """The model, its loss and its metrics."""

    model: str = "small_cnn"
    """Name of a model family, or PACKAGE.MODULE:FUNCTION of your own, returning a Keras model."""
    model_args: dict[str, Scalar] = field(default_factory=dict)
    """Arguments of the model's builder, as NAME VALUE pairs."""
    loss: str | None = None
    """Keras name of the loss, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.loss."""
    metrics: tuple[str, ...] | None = None
    """Keras names of metrics, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.metrics."""
    embedding_sharding: EmbeddingSharding = "none"
    """Shard the model's embedding tables along ep: whole tables, rows, or columns."""
    sequence_parallel: bool = False
    """With --parallel tp=N: shard activations between blocks along the sequence; less memory, same traffic."""
