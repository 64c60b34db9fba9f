"""Data sources by name: one of ours, or a user's own function."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.splits import DataSplits
from hvdtrain.data.user_data import user_splits

SOURCES = {
    "digits": "hvdtrain.data.digits:load",
    "synthetic_images": "hvdtrain.data.synthetic:load",
    "synthetic_tokens": "hvdtrain.data.synthetic_tokens:load",
}


def load_splits(config: DataConfig, seed: int = 0) -> DataSplits:
    """Load the training and validation samples that `config` names.

    Args:
        config: data source and arguments.
        seed: what a user's own function draws is a function of it.

    Raises:
        ConfigError: unknown source or argument; see `user_splits`.
        DataError: the data cannot be used.
    """
    if is_user_code(config.data):
        return user_splits(config, seed)
    load = resolve("dataset", config.data, SOURCES)
    check_arguments("dataset", config.data, load, config.data_args)
    splits: DataSplits = load(**config.data_args)
    return splits
