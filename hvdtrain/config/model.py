"""Options of the model."""

from typing import Literal

from hvdtrain.config.errors import opt
from hvdtrain.config.options import applies_to, excludes, flag, option, section
from hvdtrain.config.parallel import parse_axes

Scalar = bool | int | float | str
OutputKind = Literal["logits", "probabilities", "binary_logits", "binary_probabilities", "values"]
"""Model output: class logits or probabilities, those of label 1 (binary), or regression values."""

EmbeddingSharding = Literal["none", "table", "row", "column"]
"""Sharding of embedding tables: none, whole tables per rank, by row, or by column."""


@section
class ModelConfig:
    """The model, its loss and its metrics."""

    model: str = flag("small_cnn")
    """Name of a model family, or PACKAGE.MODULE:FUNCTION of your own, returning a Keras model."""
    model_args: dict[str, Scalar] = flag({})
    """Arguments of the model's builder, as NAME VALUE pairs."""
    loss: str | None = option(None)
    """Keras name of the loss, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.loss."""
    metrics: tuple[str, ...] | None = option(None)
    """Keras names of metrics, or MODULE:ATTRIBUTE; None: the model family's, or your FUNCTION.metrics."""
    embedding_sharding: EmbeddingSharding = flag(
        "none",
        excludes(
            "parallel",
            why="it divides tables among the ranks along ep",
            instead="name ep there, or leave it out: then all ranks are along ep",
            holds=lambda _, parallel: parallel is not None and "ep" not in parse_axes(parallel),
        ),
    )
    """Shard the model's embedding tables along ep: whole tables, rows, or columns."""
    sequence_parallel: bool = option(
        False,
        applies_to(
            "tp",
            instead=f"leave it out, or go on with a run that had it by {opt('sequence_parallel', False)}",
        ),
        excludes("cp", why="both cut sequences"),
    )
    """With --parallel tp=N: shard activations between blocks along the sequence; less memory, same traffic."""
