"""Benchmark models, on random data. No TensorFlow."""

from dataclasses import dataclass, replace

from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.model import ModelConfig
from hvdtrain.config.optim import OptimConfig
from hvdtrain.config.registry import suggestion
from hvdtrain.config.run import Config
from hvdtrain.config.training import PrecisionName, TrainingConfig

SGD = OptimConfig("sgd", learning_rate=0.01)
MOMENTUM = OptimConfig("sgd", {"momentum": 0.9}, learning_rate=0.01)
ADAM = OptimConfig("adam", learning_rate=1e-4)


@dataclass(frozen=True)
class BenchModel:
    """A benchmark model."""

    about: str
    config: Config
    """Model, data and optimizer; its batch is the global batch."""
    steps: int
    """Steps of a window: the default logging interval, or more if steps are short."""


def _model(
    name: str, about: str, model: ModelConfig, data: DataConfig, optim: OptimConfig, steps: int
) -> tuple[str, BenchModel]:
    return name, BenchModel(
        about,
        Config(recipe=f"bench {name}", model=model, data=data, optim=optim, training=TrainingConfig(epochs=1)),
        steps,
    )


MODELS = dict(
    (
        _model(
            "resnet20",
            about="ResNet-20, 0.27 M parameters, 32 x 32 images: mostly arithmetic",
            model=ModelConfig("resnet", {"depth": 20}),
            data=DataConfig("synthetic_images", {"samples": 4096}, batch=64),
            optim=MOMENTUM,
            steps=10,
        ),
        _model(
            "lm",
            about="transformer language model, 12.7 M parameters, sequences of 128 tokens",
            model=ModelConfig("transformer"),
            data=DataConfig("synthetic_tokens", {"samples": 1024}, batch=8),
            optim=ADAM,
            steps=10,
        ),
        _model(
            "mlp",
            about="wide MLP, 58.6 M parameters, 234 MB of gradients: mostly exchange",
            model=ModelConfig("mlp", {"depth": 4, "width": 4096}),
            data=DataConfig("synthetic_images", {"size": 20, "channels": 5, "samples": 4096}, batch=64),
            optim=SGD,
            steps=10,
        ),
        _model(
            "dlrm",
            about="recommendation model, 26 tables of 50,000 rows: sparse gradients",
            model=ModelConfig("dlrm", {"rows": 50_000}),
            data=DataConfig("synthetic_clicks", {"rows": 50_000, "samples": 32_768}, batch=256),
            optim=SGD,
            steps=20,
        ),
        _model(
            "digits",
            about="small CNN, 0.15 M parameters, 8 x 8 images: steps of milliseconds, for a first try",
            model=ModelConfig("small_cnn"),
            data=DataConfig("synthetic_images", {"size": 8, "channels": 1, "samples": 4096}, batch=64),
            optim=MOMENTUM,
            steps=10,
        ),
        _model(
            "mlp_deep",
            about="MLP of 13 layers, 7.7 M parameters, 31 MB of gradients: starts quickly; what --autotune times",
            model=ModelConfig("mlp", {"depth": 12, "width": 768}),
            data=DataConfig("synthetic_images", {"size": 16, "channels": 5, "samples": 4096}, batch=64),
            optim=SGD,
            steps=10,
        ),
        _model(
            "resnet50",
            about="ResNet-50, 25.6 M parameters, 224 x 224 images: for GPUs",
            model=ModelConfig("resnet_imagenet"),
            data=DataConfig("synthetic_images", {"size": 224, "classes": 1000, "samples": 512}, batch=64),
            optim=MOMENTUM,
            steps=10,
        ),
        _model(
            "lm_large",
            about="transformer language model, 136 M parameters, sequences of 1024 tokens: for GPUs",
            model=ModelConfig("transformer", {"depth": 12, "width": 768, "heads": 12}),
            data=DataConfig("synthetic_tokens", {"length": 1024, "vocabulary": 32_768, "samples": 512}, batch=16),
            optim=ADAM,
            steps=10,
        ),
    )
)
"""Models by name; those after `dlrm` run only on request."""
USUAL = ("resnet20", "lm", "mlp", "dlrm")


def bench_model(name: str) -> BenchModel:
    """Return the model `name`.

    Raises:
        ConfigError: unknown name; suggests the nearest.
    """
    if name not in MODELS:
        raise ConfigError(f"bench has no model {name!r}.{suggestion(name, dict.fromkeys(MODELS, ''))}")
    return MODELS[name]


def bench_config(name: str, *, batch: int, precision: PrecisionName = "float32", accumulate: int = 1) -> Config:
    """Return the configuration of `name` with `batch` samples per step over all ranks.

    Raises:
        ConfigError: unknown model.
    """
    config = bench_model(name).config
    return replace(
        config,
        data=replace(config.data, batch=batch),
        training=replace(config.training, precision=precision, accumulate=accumulate),
    )
