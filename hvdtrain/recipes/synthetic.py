"""Small runs of each model family on synthetic data, for smoke tests."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def resnet_synthetic() -> Config:
    """ResNet-8 on random 32 x 32 images, to measure speed: nothing to learn in them."""
    return Config(
        recipe="resnet_synthetic",
        model=ModelConfig("resnet", {"depth": 8}),
        data=DataConfig("synthetic_images", {"samples": 2048}),
        optim=OptimConfig("sgd", {"momentum": 0.9}, learning_rate=0.05),
        training=TrainingConfig(epochs=2),
    )


def lm_synthetic() -> Config:
    """Small causal transformer on a random language, learnable to 0.7 accuracy."""
    return Config(
        recipe="lm_synthetic",
        model=ModelConfig("transformer", {"depth": 2, "width": 64, "heads": 4}),
        data=DataConfig("synthetic_tokens", {"length": 64, "vocabulary": 256, "samples": 2048}),
        optim=OptimConfig("adam", learning_rate=3e-3, schedule="cosine", warmup_steps=10),
        training=TrainingConfig(epochs=5),
    )


def mlp_synthetic() -> Config:
    """Wide multilayer perceptron on random images, to measure the exchange: nothing to learn in them."""
    return Config(
        recipe="mlp_synthetic",
        model=ModelConfig("mlp"),
        data=DataConfig("synthetic_images", {"size": 16, "samples": 2048}),
        optim=OptimConfig("sgd", learning_rate=0.01),
        training=TrainingConfig(epochs=2),
    )


def wide_mlp() -> Config:
    """38 million parameters in five matrices, on random images: the exchange takes longer than the arithmetic."""
    return Config(
        recipe="wide_mlp",
        model=ModelConfig("mlp", {"depth": 4, "width": 3072}),
        data=DataConfig("synthetic_images", {"samples": 2048}),
        optim=OptimConfig("sgd", learning_rate=0.01),
        training=TrainingConfig(epochs=2),
    )
