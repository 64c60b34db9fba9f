"""Data sources by name: built-in ones, or a user's own function."""

from hvdtrain.config.data import DataConfig
from hvdtrain.config.registry import check_arguments, resolve
from hvdtrain.config.user_code import is_user_code
from hvdtrain.data.preprocessing import Preprocessing
from hvdtrain.data.source import DataSplits
from hvdtrain.data.sources.user_data import user_splits

SOURCES = {
    "arrays": "hvdtrain.data.sources.npz:load",
    "class_folders": "hvdtrain.data.sources.images:load",
    "csv": "hvdtrain.data.sources.table:load",
    "digits": "hvdtrain.data.digits:load",
    "hf": "hvdtrain.data.sources.rows:load_hugging_face",
    "keras": "hvdtrain.data.sources.keras_datasets:load",
    "masked_text": "hvdtrain.data.sources.text:load_masked",
    "synthetic_clicks": "hvdtrain.data.sources.synthetic:load_clicks",
    "synthetic_images": "hvdtrain.data.sources.synthetic:load_images",
    "synthetic_tokens": "hvdtrain.data.sources.synthetic:load_tokens",
    "text": "hvdtrain.data.sources.text:load",
    "tfds": "hvdtrain.data.sources.rows:load_tfds",
    "tfrecord": "hvdtrain.data.sources.tfrecord:load",
}
LIKE_A_RUN = {
    "csv": "hvdtrain.data.sources.table:load_like",
    "masked_text": "hvdtrain.data.sources.text:load_masked_like",
    "text": "hvdtrain.data.sources.text:load_like",
}
"""Sources that learn from their training samples, and how they load others for the model of a run."""


def load_splits(config: DataConfig, seed: int = 0) -> DataSplits:
    """Load the training and validation samples that `config` names.

    Args:
        config: data source and arguments.
        seed: seeds the generators that a user's own function may draw from.

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


def load_like(config: DataConfig, trained: Preprocessing, classes: int | None, seed: int = 0) -> DataSplits:
    """Load the samples that `config` names with the vocabularies, tokenizer … of a run on data from the same source.

    Args:
        config: data source and arguments.
        trained: the run's preprocessing.
        classes: its number of classes.
        seed: as in `load_splits`.

    Raises:
        ConfigError: unknown source or argument; see `user_splits`.
        DataError: the data cannot be used.
    """
    if config.data not in LIKE_A_RUN:
        return load_splits(config, seed)
    check_arguments("dataset", config.data, resolve("dataset", config.data, SOURCES), config.data_args)
    splits: DataSplits = resolve("dataset", config.data, LIKE_A_RUN)(trained, classes, **config.data_args)
    return splits
