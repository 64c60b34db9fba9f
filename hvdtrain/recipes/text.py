"""Language models on text: your own, or Python's bundled documentation."""

from dataclasses import replace

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig, Scalar
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def gpt_char() -> Config:
    """Small causal transformer on the characters of a text: Python's documentation, or --data-args path FILE."""
    return Config(
        recipe="gpt_char",
        model=ModelConfig("transformer", {"depth": 4, "width": 128, "heads": 4, "dropout": 0.1}),
        data=DataConfig("text", batch=32),
        optim=OptimConfig(
            "adamw",
            {"beta_2": 0.99},
            learning_rate=2e-3,
            schedule="cosine",
            final_rate=0.05,
            warmup_steps=100,
            weight_decay=0.1,
            clip_norm=1.0,
        ),
        training=TrainingConfig(epochs=15),
    )


def moe_char() -> Config:
    """Small transformer with 8 experts in every other block, on characters."""
    sizes: dict[str, Scalar] = {"depth": 4, "width": 128, "heads": 4, "dropout": 0.1, "experts": 8, "top_k": 2}
    return replace(gpt_char(), recipe="moe_char", model=ModelConfig("moe_transformer", sizes))


def bert_mini() -> Config:
    """Transformer that fills in masked characters of a text: Python's documentation, or --data-args path FILE."""
    return Config(
        recipe="bert_mini",
        model=ModelConfig("bert", {"depth": 4, "width": 256, "heads": 4, "dropout": 0.1}),
        data=DataConfig("masked_text", batch=64),
        optim=OptimConfig(
            "adamw",
            learning_rate=1e-3,
            schedule="cosine",
            warmup_steps=100,
            weight_decay=0.01,
            clip_norm=1.0,
        ),
        training=TrainingConfig(epochs=2),
    )
