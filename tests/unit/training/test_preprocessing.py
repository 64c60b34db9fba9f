"""Models that preprocess their samples, as KerasHub's tasks do."""

import keras
import numpy as np
import pytest

from hvdtrain import Trainer
from tests.extended import mostly_extended

TEXTS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
LABELS = np.arange(10) % 2
WEIGHTS = np.linspace(0.5, 1.5, 10)
pytestmark = pytest.mark.usefixtures("session")


class OfTexts(keras.Sequential):
    """Takes texts, of which it sees the first letters."""

    preprocessor = "there is one"

    def preprocess_samples(self, x, y=None, sample_weight=None):
        letters = np.array([[ord(letter) / 128 for letter in text[:3]] for text in x], "float32")
        return keras.utils.pack_x_y_sample_weight(letters, y, sample_weight)


def trainer():
    keras.utils.set_random_seed(0)
    model = OfTexts([keras.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, weighted_metrics=["accuracy"])
    return Trainer(model)


def letters():
    return OfTexts().preprocess_samples(TEXTS)


@pytest.mark.extended
@pytest.mark.parametrize(
    "validation",
    mostly_extended(
        [{"validation_split": 0.3}, {"validation_data": (TEXTS[:4], LABELS[:4])}, {}],
        lambda validation: "validation_split" in validation,
        why="its parts are preprocessed as all others",
    ),
)
def test_texts_train_as_what_is_made_of_them(validation):
    ours, theirs = trainer(), trainer()
    theirs.model.preprocessor = None
    held_out = {"validation_data": (letters()[:4], LABELS[:4])} if "validation_data" in validation else validation
    fit = {"batch": 4, "epochs": 2, "sample_weight": WEIGHTS, "verbose": 0}
    found = ours.fit(TEXTS, LABELS, **fit, **validation)
    expected = theirs.fit(letters(), LABELS, shuffle=False, **fit, **held_out)
    assert found.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-5)
    np.testing.assert_allclose(ours.predict(TEXTS), theirs.predict(letters()), rtol=1e-5)
    theirs_evaluated = theirs.evaluate(letters(), LABELS, sample_weight=WEIGHTS, verbose=0)
    np.testing.assert_allclose(
        ours.evaluate(TEXTS, LABELS, sample_weight=WEIGHTS, verbose=0), theirs_evaluated, rtol=1e-5
    )
