"""Options of the text that a language model generates."""

from dataclasses import dataclass

from hvdtrain.config.errors import ConfigError, opt


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
