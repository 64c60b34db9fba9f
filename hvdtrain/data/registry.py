"""Data sources by name."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.data.splits import DataSplits

SOURCES = {
    "digits": "hvdtrain.data.digits:load",
    "synthetic_images": "hvdtrain.data.synthetic:load",
}


def load_splits(config: DataConfig) -> DataSplits:
    """Load the training and validation samples that `config` names.

    Raises:
        ConfigError: unknown source or argument.
        DataError: the data cannot be used.
    """
    load = resolve("dataset", config.dataset, SOURCES)
    check_arguments("dataset", config.dataset, load, config.dataset_args)
    splits: DataSplits = load(**config.dataset_args)
    return splits
