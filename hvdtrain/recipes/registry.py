"""Registry of recipes."""

from hvdtrain.config.registry import resolve
from hvdtrain.config.run import Config

RECIPES = {
    "digits": "hvdtrain.recipes.digits:digits",
    "mnist": "hvdtrain.recipes.mnist:mnist",
    "cifar10": "hvdtrain.recipes.cifar10:cifar10",
    "resnet50": "hvdtrain.recipes.resnet50:resnet50",
    "gpt_char": "hvdtrain.recipes.text:gpt_char",
    "moe_char": "hvdtrain.recipes.text:moe_char",
    "bert_mini": "hvdtrain.recipes.text:bert_mini",
    "dlrm": "hvdtrain.recipes.dlrm:dlrm",
    "wide_mlp": "hvdtrain.recipes.synthetic:wide_mlp",
    "resnet_synthetic": "hvdtrain.recipes.synthetic:resnet_synthetic",
    "lm_synthetic": "hvdtrain.recipes.synthetic:lm_synthetic",
    "mlp_synthetic": "hvdtrain.recipes.synthetic:mlp_synthetic",
}
DEFAULT = "digits"


def recipe(name: str) -> Config:
    """Return the configuration of the recipe `name`. Raises ConfigError: unknown name; suggests the nearest."""
    config: Config = resolve("recipe", name, RECIPES)()
    return config


def describe(name: str) -> str:
    """Return the first line of a recipe's docstring."""
    text = resolve("recipe", name, RECIPES).__doc__ or ""
    return str(text.strip().splitlines()[0])
