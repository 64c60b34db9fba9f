"""Model families by name."""

import keras

from hvdtrain.config.model import ModelConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.models.family import ModelFamily

MODELS = {
    "small_cnn": "hvdtrain.models.small_cnn.model:FAMILY",
    "resnet": "hvdtrain.models.resnet.model:FAMILY",
}


def model_family(config: ModelConfig) -> ModelFamily:
    """Return the family that `config` names, after checking its arguments.

    Raises:
        ConfigError: unknown model or argument.
    """
    family: ModelFamily = resolve("model", config.model, MODELS)
    check_arguments("model", config.model, family.build, config.model_args)
    return family


def build_model(config: ModelConfig, shape: tuple[int, ...], classes: int, seed: int) -> keras.Model:
    """Build the model that `config` names for inputs of `shape`."""
    return model_family(config).build(shape, classes, seed, **config.model_args)
