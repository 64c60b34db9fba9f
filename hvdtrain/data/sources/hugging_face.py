"""Data sets of Hugging Face's `datasets`: a folder that `save_to_disk` wrote, or one of the hub by its name.

Rows are read by their numbers, in any order; images are decoded, and are to be of one size. The training split is
`train`, that for validation the first there is of `validation` and `test`; without one, training rows are held out.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from hvdtrain.config.errors import ConfigError, DataError
from hvdtrain.data.files.places import find_data
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
    """Return the rows of a data set.

    Args:
        path: a folder written by `save_to_disk`; or
        name: a data set of the hub, `owner/name`; it is fetched into Hugging Face's cache if it is not there.
        configuration: which configuration of it.
        inputs: the input column, or several with commas between them, which make a dict.
        target: the target's column.
        train_split: the training split.
        validation_split: the split for validation; "": see above.
        validation: rows to hold out where there is no such split; 0: one of ten.
        classes: number of classes; 0: what the data set says.

    Raises:
        ConfigError: arguments that do not fit, or the package `datasets` is missing.
        DataError: nothing is there, or what is there cannot be used.
    """
    package = optional_package("datasets", "datasets", "--data hf")
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
    known = classes or getattr(splits[train_split].features.get(target), "num_classes", None)

    def source(split: str) -> RowSource:
        return source_of(
            splits[split], inputs=inputs.split(","), target=target, classes=known, name=f"{name or path} ({split})"
        )

    return row_splits(source(train_split), source(chosen) if chosen else None, validation=validation, classes=known)


def source_of(
    dataset: Any, *, inputs: Sequence[str], target: str, name: str = "data", classes: int | None = None
) -> RowSource:
    """Return the rows of a `datasets.Dataset` as a source.

    Args:
        dataset: the data set.
        inputs: names of the input columns; several make a dict.
        target: name of the target's column.
        name: what messages call it.
        classes: number of classes, if the target is a label.

    Raises:
        ConfigError: no such column.
        DataError: no rows, or columns that are no tensors.
    """
    check_columns(name, [*inputs, target], dataset.column_names)
    # Other columns would be read, and images in them decoded, for nothing.
    arrays = dataset.select_columns([*inputs, target]).with_format("numpy")

    def read(numbers: Sequence[int]) -> list[Row]:
        block = arrays[list(numbers)]
        return [{column: values[place] for column, values in block.items()} for place in range(len(numbers))]

    return RowSource(
        read, len(dataset), inputs=inputs, target=target, name=name, classes=classes, version=dataset._fingerprint
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
    """Return the splits by name; a single one is for training."""
    splits = opened if isinstance(opened, Mapping) else {"train": opened}
    if not splits:
        raise DataError(f"{name} holds no splits.")
    return splits
