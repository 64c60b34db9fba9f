"""Recipes: functions that return a full `Config`, by name.

A recipe's docstring is its line in `python -m hvdtrain recipes`.
"""

from collections.abc import Callable
from dataclasses import replace

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig, Scalar
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.registry import suggestion
from hvdtrain.config.run import Config
from hvdtrain.config.training import TrainingConfig


def digits() -> Config:
    """Small CNN on the bundled 8 x 8 digits: 0.97 validation accuracy in seconds."""
    return Config(
        recipe="digits",
        model=ModelConfig("small_cnn"),
        data=DataConfig("digits", batch=64),
        optim=OptimConfig("adam", learning_rate=2e-3, schedule="cosine"),
        training=TrainingConfig(epochs=10),
    )


def mnist() -> Config:
    """Small CNN on MNIST, which Keras downloads; --data-args name fashion_mnist for Fashion-MNIST."""
    return Config(
        recipe="mnist",
        model=ModelConfig("small_cnn"),
        data=DataConfig("keras", {"name": "mnist"}, batch=128, eval_batch=500),
        optim=OptimConfig("adam", learning_rate=1e-3, schedule="cosine"),
        training=TrainingConfig(epochs=5),
    )


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


def resnet50() -> Config:
    """ResNet-50 on random 224 x 224 images, to measure it; on real ones by --data tfrecord --data-args path FOLDER.

    The learning rate is that of He et al. (2015) for 256 images a step and follows the batch. The decay of 1e-3 acts
    on the weights themselves: with a momentum of 0.9 it is their 1e-4 within the loss. For batches in the thousands add
    --warmup-steps, about five epochs (Goyal et al. 2017, arXiv:1706.02677).
    """
    return Config(
        recipe="resnet50",
        model=ModelConfig("resnet_imagenet"),
        data=DataConfig("synthetic_images", {"size": 224, "classes": 1000, "samples": 256}, batch=32, eval_batch=32),
        optim=OptimConfig(
            "sgd",
            {"momentum": 0.9, "nesterov": True},
            learning_rate=0.1,
            lr_scaling="linear",
            base_batch=256,
            schedule="cosine",
            weight_decay=1e-3,
        ),
        training=TrainingConfig(epochs=90),
    )


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


def dlrm() -> Config:
    """Recommendation model with 26 embedding tables, on synthetic clicks; files in Criteo's shape by --data csv."""
    return Config(
        recipe="dlrm",
        model=ModelConfig("dlrm"),
        data=DataConfig("synthetic_clicks", batch=256, eval_batch=1024),
        optim=OptimConfig("adam", learning_rate=2e-3, schedule="cosine"),
        training=TrainingConfig(epochs=1),
    )


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


_ALL: tuple[Callable[[], Config], ...] = (
    *(digits, mnist, cifar10, resnet50, gpt_char, moe_char, bert_mini, dlrm),
    *(wide_mlp, resnet_synthetic, lm_synthetic, mlp_synthetic),
)
RECIPES = {function.__name__: function for function in _ALL}
DEFAULT = "digits"


def recipe(name: str) -> Config:
    """Return the configuration of the recipe `name`. Raises ConfigError: unknown name; suggests the nearest."""
    if name not in RECIPES:
        raise ConfigError(f"Unknown recipe {name!r}.{suggestion(name, dict.fromkeys(RECIPES, ''))}")
    return RECIPES[name]()


def run_name(config: Config) -> str:
    """Return what a run is called: its recipe, or its data where the default recipe was given others."""
    if config.recipe != DEFAULT or config.data.data == RECIPES[DEFAULT]().data.data:
        return config.recipe
    return config.data.data.partition(":")[0].rpartition(".")[2]  # of PACKAGE.MODULE:ATTRIBUTE the module


def describe(name: str) -> str:
    """Return the first line of a recipe's docstring."""
    return (RECIPES[name].__doc__ or "").strip().partition("\n")[0]
