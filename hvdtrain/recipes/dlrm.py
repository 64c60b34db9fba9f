"""Recommendation: dense and sparse gradients in one model."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def dlrm() -> Config:
    """Recommendation model with 26 embedding tables, on synthetic clicks; files in Criteo's shape by --data csv."""
    return Config(
        recipe="dlrm",
        model=ModelConfig("dlrm"),
        data=DataConfig("synthetic_clicks", batch=256, eval_batch=1024),
        optim=OptimConfig("adam", learning_rate=2e-3, schedule="cosine"),
        training=TrainingConfig(epochs=1),
    )
