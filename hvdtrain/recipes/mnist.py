"""MNIST, and Fashion-MNIST by --data-args name fashion_mnist."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def mnist() -> Config:
    """Small CNN on MNIST, which Keras downloads; --data-args name fashion_mnist for Fashion-MNIST."""
    return Config(
        recipe="mnist",
        model=ModelConfig("small_cnn"),
        data=DataConfig("keras", {"name": "mnist"}, batch=128, eval_batch=500),
        optim=OptimConfig("adam", learning_rate=1e-3, schedule="cosine"),
        training=TrainingConfig(epochs=5),
    )
