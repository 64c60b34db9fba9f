"""Description of how raw data become a model's inputs, so that evaluation and prediction can repeat it.

A source describes itself in `DataSplits.preprocessing`; the run's folder keeps the description. It holds values only:
the arithmetic is that of the sources (`images.py`, `table.py` and `tokenizers.py` there).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.errors import DataError


@dataclass(frozen=True)
class ImageInputs:
    """Images: pixels times 1 / white, minus `mean`, divided by `std`, in this order."""

    height: int
    width: int
    channels: int
    white: float = 255.0
    """Value of a white pixel in arrays; in image files it is 255."""
    mean: tuple[float, ...] = ()
    """One number, or one for each channel; empty: nothing is subtracted."""
    std: tuple[float, ...] = ()
    """Likewise; empty: nothing is divided."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.height, self.width, self.channels


@dataclass(frozen=True)
class TableColumn:
    """An input column of a table."""

    name: str
    vocabulary: tuple[str, ...] | None = None
    """Texts with the ids 1, 2, …; None for a column of numbers."""


@dataclass(frozen=True)
class TableInputs:
    """Rows of a table; see `sources/table.py` for the encoding."""

    columns: tuple[TableColumn, ...]
    """In the order of the inputs."""
    as_dict: bool
    """Whether inputs are {"numeric": …, "categorical": …} rather than one array."""
    missing: float | None
    """Value of a missing number, with which a missing text becomes 0; None: values must not be missing."""
    target: str
    """Name of the target column."""
    delimiter: str = ","
    """Character between two values in a file."""


@dataclass(frozen=True)
class TextInputs:
    """Windows of tokens."""

    tokenizer: str
    """`chars`, `bytes` or `sentencepiece`."""
    length: int
    """Tokens of a window."""
    masked: bool = False
    """Whether the model fills in masked tokens rather than continuing the text."""
    alphabet: str = ""
    """All characters that `chars` encodes, in the order of their tokens."""
    model: str = ""
    """File of the `sentencepiece` model."""


@dataclass(frozen=True)
class Preprocessing:
    """Preparation of raw data, and the names of the labels; of the three kinds at most one.

    Without a kind, inputs are arrays that the model takes as they are.
    """

    class_names: tuple[str, ...] | None = None
    """Names of the labels 0, 1, …; None if labels are numbers without names."""
    image: ImageInputs | None = None
    table: TableInputs | None = None
    text: TextInputs | None = None

    @property
    def kind(self) -> str:
        """`image`, `table`, `text` or `array`."""
        return next((kind for kind in ("image", "table", "text") if getattr(self, kind) is not None), "array")


def label_mapping(
    theirs: tuple[str, ...] | None, mine: tuple[str, ...] | None, source: Callable[[], str]
) -> tuple[int, ...] | None:
    """Return the label of the model for each label of other data, by name; None if they are the same.

    Args:
        theirs: class names of the other data; None if labels have none.
        mine: those of the model.
        source: returns the name of the other data, for the message.

    Raises:
        DataError: names a class that the model does not know.
    """
    if theirs is None or mine is None or theirs == mine:
        return None
    strange = [name for name in theirs if name not in mine]
    if strange:
        known = ", ".join(mine[:20]) + (", …" if len(mine) > 20 else "")
        raise DataError(
            f"{source()} has the class {strange[0]!r}, which the run was not trained on. It knows: {known}. Leave "
            "these samples out, or rename the class."
        )
    return tuple(mine.index(name) for name in theirs)


def listed_numbers(option: str, given: Any, channels: int) -> tuple[float, ...]:
    """Return numbers separated by commas, one or `channels` of them; none for None.

    Raises:
        DataError: something else.
    """
    if given is None:
        return ()
    words = str(given).split(",")
    try:
        numbers = tuple(float(word) for word in words)
    except ValueError:
        numbers = ()
    if len(numbers) not in (1, channels):
        raise DataError(
            f"--data-args {option} takes one number, or {channels} separated by commas, one for each channel. "
            f"Received: {given!r}."
        )
    return numbers
