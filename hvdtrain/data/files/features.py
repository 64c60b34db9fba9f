"""The description of TFRecord records, in a YAML file: their features, and which are inputs and targets.

    features:
      image/encoded: {kind: image, shape: [32, 32, 3]}
      image/class/label: {kind: int64, dtype: int32}
      weight: {kind: float32}
    inputs: image/encoded
    targets: image/class/label
    sample_weight: weight
    classes: 10
    class_names: [airplane, automobile, …]
    name: image/filename

`features` maps the features of a record (a tf.train.Example) to their kinds:

    image     an encoded JPEG, PNG, GIF or BMP file, decoded to bytes of pixels, shape [height, width, channels]; height
              and width may be null: they then come from the first image, or from --data-args image_size
    bytes     the raw, little-endian bytes of a tensor of `dtype` (default uint8) and `shape`
    int64     whole numbers of `shape`
    float32   numbers of `shape`

`shape` defaults to [], for images to [null, null, 3]; int64 and float32 are cast to `dtype` if there is one.
`inputs` and `targets` are a feature, or several as {name of the model's input: feature}. uint8 inputs are pixels:
they become float32 in [0, 1] after augmentation. With `classes`, integer targets are labels, and one outside of
[0, classes) is an error. `class_names`, in the order of the labels, `sample_weight` and `name` (the record's name in
messages) are optional.
"""

import os
from pathlib import Path
from typing import Any, Literal

import yaml

from hvdtrain.config.errors import DataError
from hvdtrain.config.section import section

FILE_NAME = "features.yaml"
Dims = tuple[int | None, ...]


@section
class Feature:
    """One feature of a record."""

    kind: Literal["image", "bytes", "int64", "float32"]
    shape: Dims | None = None
    dtype: str | None = None

    @property
    def dims(self) -> Dims:
        """The shape, or the default of its kind."""
        return self.shape if self.shape is not None else ((None, None, 3) if self.kind == "image" else ())


@section
class Description:
    """The features of a record, and their roles in training."""

    features: dict[str, Feature]
    inputs: str | dict[str, str]
    targets: str | dict[str, str]
    sample_weight: str | None = None
    classes: int | None = None
    class_names: tuple[str, ...] | None = None
    name: str | None = None

    @property
    def used(self) -> dict[str, Feature]:
        """The features used in training."""
        nests = [self.inputs, self.targets, *([self.sample_weight] if self.sample_weight else [])]
        keys = [key for nest in nests for key in ([nest] if isinstance(nest, str) else nest.values())]
        return {key: self.features[key] for key in keys}


def read_description(path: Path) -> Description:
    """Read a description from a YAML file.

    Raises:
        DataError: it cannot be read, or is malformed; names the file and the key.
    """
    import pydantic

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
        description: Description = pydantic.TypeAdapter(Description).validate_python(values)
    except OSError as error:
        raise _refusal(path, f"cannot be read: {error.strerror}.") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _refusal(path, f"is no valid YAML: {error}") from None
    except pydantic.ValidationError as error:
        raise _refusal(path, "does not fit:\n" + "\n".join(map(_line, error.errors()))) from None
    _check(description, path)
    return description


def write_description(path: Path, description: Description) -> None:
    """Write a description atomically, without the options left at their defaults."""
    features = {key: _chosen(vars(feature)) for key, feature in description.features.items()}
    values = {**_chosen(vars(description)), "features": features}
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(yaml.safe_dump(values, sort_keys=False, default_flow_style=None), encoding="utf-8")
    os.replace(draft, path)


def _chosen(values: dict[str, Any]) -> dict[str, Any]:
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
    return {key: value for key, value in plain.items() if value is not None}


def _refusal(path: Path, text: str) -> DataError:
    return DataError(f"The description {path} {text}")


def _line(problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"])
    return f"  {place or 'the file'}: {problem['msg']}. Received: {problem['input']!r}."


def _check(description: Description, path: Path) -> None:
    try:
        used = description.used
    except KeyError as error:
        known = ", ".join(description.features)
        raise _refusal(path, f"trains on {error.args[0]!r}, which is none of its features ({known}).") from None
    if description.classes is not None and description.classes < 1:
        raise _refusal(path, f"needs at least 1 class. Received: classes: {description.classes}.")
    if description.class_names is not None and len(description.class_names) != description.classes:
        raise _refusal(
            path,
            f"must give each class a name. Received: classes: {description.classes}, and "
            f"{len(description.class_names)} class_names.",
        )
    for key, feature in used.items():
        if feature.kind == "image" and (len(feature.dims) != 3 or feature.dims[2] not in (1, 3, 4) or feature.dtype):
            raise _refusal(
                path,
                f"must give the image {key!r} a shape [height, width, 1, 3 or 4], and no dtype: pixels are bytes.",
            )
        if feature.kind != "image" and None in feature.dims:
            raise _refusal(path, f"leaves a dim of {key!r} open (null): only height and width of images may be.")
