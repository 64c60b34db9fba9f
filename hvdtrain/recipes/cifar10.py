"""CIFAR-10: a residual network on 32 x 32 colour images in ten classes."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def cifar10() -> Config:
    """ResNet-20 on CIFAR-10 in class folders (cifar10-train.tar.gz), 5,000 of 50,000 held out."""
    return Config(
        recipe="cifar10",
        model=ModelConfig("resnet", {"depth": 20}),
        data=DataConfig(
            "class_folders",
            {"path": "cifar10-train.tar.gz", "validation": 5000},
            batch=128,
            eval_batch=500,
            augment=("crop", "flip"),
        ),
        optim=OptimConfig(
            "sgd", {"momentum": 0.9, "nesterov": True}, learning_rate=0.1, schedule="cosine", weight_decay=2e-3
        ),
        training=TrainingConfig(epochs=30),
    )
