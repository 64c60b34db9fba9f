import functools
import json
import re

import keras
import numpy as np
import pytest

from hvdtrain.backends.single import SingleBackend
from hvdtrain.config.errors import DataError
from hvdtrain.data.arrays import ArraySource
from hvdtrain.data.identity import check_same_data
from hvdtrain.data.shapes import check_shapes
from hvdtrain.data.source import DataSplits

layers, losses = keras.layers, keras.losses


def splits(x, y, validation=None):
    train = ArraySource((x, y), "train")
    return DataSplits(train, ArraySource(validation, "validation") if validation else train, None, None)


def images(*shape, count=4):
    return np.zeros((count, *shape), "float32")


def model(shape=(8, 8, 1), outputs=3):
    x = keras.Input(shape, name="images")
    return keras.Model(x, layers.Dense(outputs, name="logits")(layers.Flatten()(x)))


def several():
    a, b = keras.Input((2,), name="a"), keras.Input((3,), name="b")
    both = layers.Concatenate()([a, b])
    return keras.Model({"a": a, "b": b}, {"p": layers.Dense(2, name="p")(both), "q": layers.Dense(1, name="q")(both)})


LABELS = np.array([0, 1, 2, 2])
SPARSE = losses.SparseCategoricalCrossentropy(from_logits=True)


# -- what fits --


@pytest.mark.parametrize("loss", [None, SPARSE, "sparse_categorical_crossentropy"])
@pytest.mark.parametrize("shape", [(8, 8, 1), (8, 8), (8, 8, 1, 1)])  # Keras adds and takes away a last dim of 1
@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None], LABELS.astype("uint8")])
def test_labels_of_a_classifier(shape, labels, loss):
    given = model()
    data = splits(images(*shape), labels)
    given(data.train.elements[0])  # Keras itself takes it
    check_shapes(given, data, loss)


@pytest.mark.parametrize(
    ("outputs", "targets", "loss"),
    [
        (3, np.eye(4, 3, dtype="float32"), "categorical_crossentropy"),
        (1, np.array([0.0, 1, 1, 0]), "binary_crossentropy"),
        (1, np.array([[0], [90], [1], [0]]), "mse"),
        (1, np.array([0, 90, 1, 0]), "mse"),
        (3, np.array([0, 90, 1, 0]), lambda y, p: p[:, 0]),  # only its author knows what it takes
        (3, images(5), lambda y, p: p[:, 0]),
        (3, np.array([0, 1, 2, 255]), losses.SparseCategoricalCrossentropy(ignore_class=255)),
        (3, np.array([0, 1, -1, 2]), losses.SparseCategoricalCrossentropy(ignore_class=-1)),
        (3, np.array([9, 9, 9, 9]), "no such loss"),  # for the trainer to refuse
    ],
)
def test_targets_that_their_loss_takes(outputs, targets, loss):
    check_shapes(model(outputs=outputs), splits(images(8, 8, 1), targets), loss)


def test_several_inputs_and_outputs_by_name_or_in_order():
    x, y = {"a": images(2), "b": images(3)}, {"p": LABELS % 2, "q": images(1)}
    check_shapes(several(), splits(x, y), {"p": SPARSE, "q": "mse"})
    check_shapes(several(), splits(x, y), [SPARSE, "mse"])
    check_shapes(several(), splits((x["a"], x["b"]), (y["p"], y["q"])), {"p": SPARSE, "q": "mse"})
    check_shapes(several(), splits(x, y | {"p": LABELS + 40}), {"q": "mse"})  # p has no loss


# -- what does not --


@pytest.mark.parametrize(
    ("x", "y", "loss", "cause"),
    [
        (images(8, 8, 1), LABELS + 10, SPARSE, "The labels of train reach 12, the model has 3 outputs"),
        (images(8, 8, 1), LABELS + 1, "sparse_categorical_crossentropy", "reach 3, the model has 3 outputs"),
        (images(8, 8, 1), LABELS + 1, None, "labels count from 0, so it needs 4."),
        (images(8, 8, 1), LABELS - 1, SPARSE, "The labels of train must count from 0. Received: -1."),
        (images(8, 8, 1), LABELS * 100, losses.SparseCategoricalCrossentropy(ignore_class=255), "reach 200"),
        (
            images(8, 8, 1),
            np.eye(4),
            "categorical_crossentropy",
            "outputs of shape (None, 3); the targets of train are ",
        ),
        (images(8, 8, 1), np.eye(4), None, "the targets of train are (None, 4), which the loss cannot compare."),
        (images(8, 8, 1), images(4, 4, 3), "mse", "the targets of train are (None, 4, 4, 3)"),
        (
            images(8, 8, 1),
            LABELS + 1,
            functools.partial(losses.sparse_categorical_crossentropy, from_logits=True),
            "reach 3",
        ),
    ],
)
def test_both_sides_are_named(x, y, loss, cause):
    with pytest.raises(DataError, match=re.escape(cause)):
        check_shapes(model(), splits(x, y), loss)


def test_validation_is_looked_at_too():
    data = splits(images(8, 8, 1), LABELS, (images(8, 8, 1), LABELS + 1))
    with pytest.raises(DataError, match="The labels of validation reach 3"):
        check_shapes(model(), data, SPARSE)


def test_a_sequence_needs_a_target_for_each_place():
    x = keras.Input((5,), dtype="int32")
    lm = keras.Model(x, layers.Embedding(9, 7)(x))
    data = splits(np.zeros((4, 5), "int32"), np.zeros((4, 6), "int32"))
    with pytest.raises(DataError, match=re.escape("outputs of shape (None, 5, 7); the targets of train are (None, 6)")):
        check_shapes(lm, data, SPARSE)


def test_one_of_several_is_named():
    x, y = {"a": images(2), "b": images(3)}, {"p": LABELS + 1, "q": images(1)}
    with pytest.raises(DataError, match="reach 3, the model has 2 outputs 'p'"):
        check_shapes(several(), splits(x, y), {"p": SPARSE, "q": "mse"})


# -- the same data everywhere --


class OfThree(SingleBackend):
    """One of three replicas, the last of which holds other data."""

    size = 3
    other = None

    def gather_bytes(self, payload, *, timeout, among="job"):
        return [payload, payload, self.other(payload)]


@pytest.mark.parametrize("part", ["training", "validation"])
def test_ranks_with_other_data_are_named(part):
    def other(payload):
        value = json.loads(payload)
        value[part] = {"samples": 1234, "fingerprint": "other"}
        return json.dumps(value).encode()

    data, backend = splits(images(2), LABELS), OfThree(None)
    backend.other = lambda payload: payload
    check_same_data(data, backend)
    backend.other = other
    with pytest.raises(DataError, match=rf"The {part} samples of rank 2 are not those of rank 0 \(1,234 and 4\)"):
        check_same_data(data, backend)


def test_a_fingerprint_is_of_values_order_types_shapes_and_names():
    x = np.arange(4, dtype="float32")
    base = (x, np.zeros(4))
    same = [ArraySource(base).fingerprint() for _ in range(2)]
    assert same[0] == same[1]
    others = [
        (x[::-1], np.zeros(4)),
        (x + 1, np.zeros(4)),
        (x.view("int32"), np.zeros(4)),
        (x[:, None], np.zeros(4)),
        ({"a": x}, np.zeros(4)),
        (np.array(list("abcd")), np.zeros(4)),
        (x > 1, np.zeros(4)),
    ]
    prints = [ArraySource(other).fingerprint() for other in others]
    assert len({same[0], *prints}) == len(others) + 1
