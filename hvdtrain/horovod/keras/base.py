"""Base class of the face's callbacks."""

from typing import Any

from hvdtrain.horovod.flavour import keras, refuse_other_keras


class OfThisKeras:
    """Rejects models of the other Keras, whose callbacks have other methods."""

    def set_model(self, model: Any) -> None:
        """Set the model, after checking its Keras."""
        refuse_other_keras(model)
        super().set_model(model)  # type: ignore[misc]


class Callback(OfThisKeras, keras.callbacks.Callback):
    """Base class of the face's callbacks."""
