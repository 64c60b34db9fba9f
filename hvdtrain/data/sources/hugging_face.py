"""Data sets of Hugging Face's `datasets`: a folder written by `save_to_disk`, or a data set of the hub.

Rows are read by number; images are decoded and must share one size. The training split is `train`, the validation split
`validation` or else `test`; without either, training rows are held out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.compat import fingerprint_of
from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.locations import find_data
from hvdtrain.data.sources.extras import optional_package
from hvdtrain.data.sources.rows import Row, RowSource, check_columns, row_splits, split_for_validation
from hvdtrain.data.splits import DataSplits


def load(
    *,
    path: str = "",
    name: str = "",
    configuration: str = "",
    inputs: str = "",
    target: str = "",
    train_split: str = "train",
    validation_split: str = "",
    validation: int = 0,
    classes: int = 0,
) -> DataSplits:
    """Load the rows of a data set.

    Args:
        path: a folder written by `save_to_disk`; or
        name: a data set of the hub, `owner/name`, downloaded into Hugging Face's cache if it is not there.
        configuration: its configuration.
        inputs: the input column, or several separated by commas, which make a dict.
        target: the target column.
        train_split: the training split.
        validation_split: the validation split; "": see above.
        validation: rows to hold out if there is no such split; 0: one in ten.
        classes: number of classes; 0: as the data set declares.

    Raises:
        ConfigError: arguments that do not fit, or the package `datasets` is missing.
        DataError: the data set does not exist, or cannot be used.
    """
    package = optional_package("datasets", "hf", "--data hf")
    if bool(path) == bool(name):
        raise ConfigError("hf needs --data-args path FOLDER (of save_to_disk), or name OWNER/NAME: one of both.")
    splits = _splits(_open(package, path, name, configuration), name or path)
    if train_split not in splits:
        raise ConfigError(f"{name or path} has no split {train_split!r}. It has: {', '.join(splits)}.")
    chosen = validation_split or split_for_validation(splits)
    if chosen and chosen not in splits:
        raise ConfigError(f"{name or path} has no split {chosen!r}. It has: {', '.join(splits)}.")
    columns = list(splits[train_split].column_names)
    if not (inputs and target):
        raise ConfigError(f"hf needs --data-args inputs COLUMN target COLUMN. There are: {', '.join(columns)}.")
    label = splits[train_split].features.get(target)
    known = classes or getattr(label, "num_classes", None)

    def source(split: str) -> RowSource:
        return source_of(
            splits[split], inputs=inputs.split(","), target=target, classes=known, name=f"{name or path} ({split})"
        )

    held, names = source(chosen) if chosen else None, getattr(label, "names", None)
    return row_splits(source(train_split), held, validation=validation, classes=known, class_names=names)


def source_of(
    dataset: Any, *, inputs: Sequence[str], target: str, name: str = "data", classes: int | None = None
) -> RowSource:
    """Return the rows of a `datasets.Dataset` as a source.

    Args:
        dataset: the data set.
        inputs: names of the input columns; several make a dict.
        target: name of the target column.
        name: its name in messages.
        classes: number of classes, if the target is a label.

    Raises:
        ConfigError: no such column.
        DataError: no rows, or columns that cannot be tensors.
    """
    check_columns(name, [*inputs, target], dataset.column_names)
    # Do not read other columns, nor decode images in them.
    arrays = dataset.select_columns([*inputs, target]).with_format("numpy")

    def read(numbers: Sequence[int]) -> list[Row]:
        block = arrays[list(numbers)]
        return [{column: values[place] for column, values in block.items()} for place in range(len(numbers))]

    return RowSource(
        read, len(dataset), inputs=inputs, target=target, name=name, classes=classes, version=fingerprint_of(dataset)
    )


def _open(package: Any, path: str, name: str, configuration: str) -> Any:
    try:
        if path:
            return package.load_from_disk(str(find_data(path)))
        return package.load_dataset(name, configuration or None)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name or path} cannot be opened by datasets: {error}") from None


def _splits(opened: Any, name: str) -> Mapping[str, Any]:
    """Return the splits by name; a single data set is the training split."""
    splits = opened if isinstance(opened, Mapping) else {"train": opened}
    if not splits:
        raise DataError(f"{name} holds no splits.")
    return splits
