"""Options of the model, and of the text that a language model generates."""

from dataclasses import dataclass
from typing import Literal

from hvdtrain.config.errors import ConfigError, opt
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


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token."""

    length: int = 200
    """Tokens to generate."""
    temperature: float = 0.8
    """Divides the logits: below 1 the likely tokens become likelier; 0 takes the likeliest."""
    top_k: int | None = None
    """Draw from the k likeliest tokens; None: from all."""
    seed: int = 0
    """Seed of the draws."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"--length must be at least 1. Received: {self.length}.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"--temperature must be at least 0. Received: {self.temperature}.")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k must be at least 1. Received: {self.top_k}.")
        if self.seed < 0:
            raise ConfigError(f"{opt('seed')} must not be negative. Received: {self.seed}.")
