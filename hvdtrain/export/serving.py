"""What an exported model takes and returns: data as users have them in, probabilities or values out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.config.model import OutputKind
from hvdtrain.data.preprocessing import ImageInputs, Preprocessing, TableInputs
from hvdtrain.data.sources.images import scaled
from hvdtrain.export.runtimes import BATCH, in_32_bits


@dataclass(frozen=True)
class Serving:
    """A model between the data that users have and the outputs that they read."""

    model: keras.Model
    """From `inputs` to readable outputs, with the trained model in it."""
    inputs: Any
    """A nest of `keras.InputSpec`: dtype and shape of a batch, whose size is None."""
    raw_of: Callable[[Any], Any]
    """Returns the inputs [samples, …] from which arrays of the trained model's inputs are made."""

    def call(self, inputs: Any) -> Any:
        """Return the outputs for arrays of `inputs`, computed in this process as a runtime does, as arrays."""
        call, count = self.compiled, len(tf.nest.flatten(inputs)[0])
        parts = []
        with tf.device("CPU"):  # where the runtimes compute; GPUs round products to fewer bits
            for begin in range(0, count, BATCH):
                part = tf.nest.map_structure(lambda array, at=begin: tf.constant(array[at : at + BATCH]), inputs)
                parts.append(tf.nest.map_structure(in_32_bits, call(part)))
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    @property
    def compiled(self) -> Any:
        """The compiled call of `model` in inference."""
        return tf.function(lambda inputs: self.model(inputs, training=False), autograph=False)


def serving_of(
    model: keras.Model, signature: Any, outputs: OutputKind, preprocessing: Preprocessing, *, strings: bool
) -> Serving:
    """Return how a trained model is served.

    Pixels come as they are in files and arrays, rows as columns of numbers and texts by name; everything else as the
    model's own inputs. Logits of classes become probabilities, but for those of tokens.

    Args:
        model: takes prepared inputs.
        signature: nest of {"dtype": …, "shape": …} of one input of the model.
        outputs: kind of the model's outputs.
        preprocessing: how its inputs are made of data.
        strings: whether the format has strings; without them, columns of texts come as the encoded rows.
    """
    prepare: keras.layers.Layer | None = None
    inputs, raw_of = specs_of(signature), _as_they_are
    table = preprocessing.table
    if preprocessing.image is not None:
        prepare = Pixels(preprocessing.image)
        inputs, raw_of = prepare.spec, prepare.pixels_of
    elif table is not None and strings:
        prepare = Columns(table)
        inputs, raw_of = prepare.specs, prepare.columns_of
    if preprocessing.text is not None:
        outputs = "values"
    return Serving(Served(model, prepare, outputs), inputs, raw_of)


def specs_of(signature: Any) -> Any:
    """Return a nest of `keras.InputSpec` for batches of any size of a nest of {"dtype": …, "shape": …}."""
    if isinstance(signature, list | tuple):
        return [
            _spec(part, f"inputs_{place:03}") if isinstance(part.get("dtype"), str) else specs_of(part)
            for place, part in enumerate(signature)
        ]
    if not isinstance(signature.get("dtype"), str):
        return {name: _spec(part, name) for name, part in signature.items()}
    return _spec(signature, "inputs")


def _spec(leaf: Mapping[str, Any], name: str) -> keras.InputSpec:
    return keras.InputSpec(leaf["dtype"], [None, *leaf["shape"]], name=name)


def _as_they_are(inputs: Any) -> Any:
    return inputs


class Served(keras.Model):
    """A model with what is done to data before it, and to its outputs after it.

    Args:
        model: takes prepared inputs.
        prepare: makes them of data; None: they are given.
        outputs: kind of the model's outputs.
    """

    def __init__(self, model: keras.Model, prepare: keras.layers.Layer | None, outputs: OutputKind) -> None:
        super().__init__(name="served")
        self.trained, self.prepare, self.outputs_kind = model, prepare, outputs
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Return readable outputs for a batch of data."""
        prepared = inputs if self.prepare is None else self.prepare(inputs)
        return readable(self.trained(prepared, training=False), self.outputs_kind)


def readable(outputs: Any, kind: OutputKind) -> Any:
    """Return tensors of outputs as `predict` shows them: probabilities [samples, classes] where there are classes."""
    if kind == "values" or not tf.is_tensor(outputs):
        return outputs
    shares = keras.ops.cast(outputs, "float32")
    if kind == "logits":
        return keras.ops.softmax(shares)
    if kind == "binary_logits":
        shares = keras.ops.sigmoid(shares)
    if kind.startswith("binary") and (len(shares.shape) == 1 or (len(shares.shape) == 2 and shares.shape[-1] == 1)):
        of_one = keras.ops.reshape(shares, (-1, 1))
        shares = keras.ops.concatenate([1.0 - of_one, of_one], axis=1)
    return shares


class Pixels(keras.layers.Layer):
    """Pixels [samples, height, width, channels] from 0 to white, scaled as in training.

    Args:
        image: size, scale, mean and standard deviation.
    """

    def __init__(self, image: ImageInputs) -> None:
        super().__init__(name="pixels", dtype="float32")
        self._image = image
        whole = image.white.is_integer() and 1 < image.white <= 255
        self.spec = keras.InputSpec("uint8" if whole else "float32", [None, *image.shape], name="pixels")

    def call(self, inputs: Any) -> Any:
        """Return inputs of the model."""
        return scaled(inputs, self._image, white=self._image.white)

    def pixels_of(self, inputs: np.ndarray) -> np.ndarray:
        """Return the pixels of prepared images."""
        image = self._image
        values = inputs.astype(np.float64) * (np.array(image.std) if image.std else 1.0)
        values = (values + (np.array(image.mean) if image.mean else 0.0)) * image.white
        return (np.rint(values).clip(0, image.white) if self.spec.dtype == "uint8" else values).astype(self.spec.dtype)


class Columns(keras.layers.Layer):
    """Columns of a table by name, each [samples]: numbers float32, NaN if missing, and texts.

    Args:
        table: its columns and vocabularies.
    """

    def __init__(self, table: TableInputs) -> None:
        super().__init__(name="columns", dtype="float32")
        self._table = table
        self.texts = {
            column.name: keras.layers.StringLookup(vocabulary=list(column.vocabulary), num_oov_indices=1)
            for column in table.columns
            if column.vocabulary
        }
        self.specs = {
            column.name: keras.InputSpec(
                "float32" if column.vocabulary is None else "string", [None], name=_plain(column.name)
            )
            for column in table.columns
        }

    def call(self, inputs: Any) -> Any:
        """Return inputs of the model."""
        numbers, ids = [], []
        missing = self._table.missing
        for column in self._table.columns:
            values = inputs[column.name]
            if column.vocabulary is None:
                numbers.append(values if missing is None else tf.where(tf.math.is_nan(values), missing, values))
            elif column.vocabulary:
                ids.append(tf.cast(self.texts[column.name](tf.strings.strip(values)), tf.int32))
            else:
                ids.append(tf.zeros_like(values, tf.int32))
        blocks = {}
        if numbers:
            blocks["numeric"] = tf.stack(numbers, axis=1)
        if ids:
            blocks["categorical"] = tf.stack(ids, axis=1)
        return blocks if self._table.as_dict else next(iter(blocks.values()))

    def columns_of(self, inputs: Any) -> dict[str, np.ndarray]:
        """Return the columns of encoded rows; a text that was not in the vocabulary becomes empty."""
        columns: dict[str, np.ndarray] = {}
        places = {"numeric": 0, "categorical": 0}
        for column in self._table.columns:
            kind = "numeric" if column.vocabulary is None else "categorical"
            values = (inputs[kind] if self._table.as_dict else inputs)[:, places[kind]]
            places[kind] += 1
            texts = np.array(["", *(column.vocabulary or ())], str)
            columns[column.name] = values if column.vocabulary is None else texts[values]
        return columns


def _plain(name: str) -> str:
    """Return a column's name as TensorFlow takes it for an argument."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name)
