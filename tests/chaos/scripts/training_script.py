"""A training as users write it, which saves checkpoints and goes on from them; a round of chaos strikes it.

Usage: (launcher) python training_script.py [FAULT RANK STEP DELAY]
"""

import hashlib
import sys
import time

import injection
import keras
import numpy as np

import hvdtrain

STEPS_PER_EPOCH, EPOCHS, BATCH = 20, 5, 16


def samples(dtype: str = "float32") -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets, of which the last batch of an epoch has fewer."""
    x = np.random.default_rng(0).standard_normal((STEPS_PER_EPOCH * BATCH - 3, 12)).astype(dtype)
    return x, (x @ np.linspace(-1, 1, 36).reshape(12, 3)).astype(dtype)


def network(dropout: float = 0.2) -> keras.Model:
    """Return a small model."""
    layers = [keras.Input((12,)), keras.layers.Dense(64, "relu")]
    layers += [keras.layers.Dropout(dropout)] if dropout else []
    return keras.Sequential([*layers, keras.layers.Dense(3)])


def unhurried() -> keras.callbacks.Callback:
    """Return a callback that gives the steps some time, in which they can be struck."""
    return keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: time.sleep(0.01))


def show(model: keras.Model) -> None:
    """Print a hash of the final parameters."""
    weights = b"".join(np.asarray(weight).tobytes() for weight in model.weights)
    print("parameters", hashlib.sha256(weights).hexdigest(), flush=True)


def main() -> None:
    hvdtrain.init(hang_timeout=5)
    keras.utils.set_random_seed(7)
    x, y = samples()
    model = network()
    factor = keras.Variable(1.0, trainable=False, name="factor")

    def loss(y_true, y_pred):
        return factor * keras.losses.mean_squared_error(y_true, y_pred)

    trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(1e-2), loss)
    print("resumed", trainer.resume("saved"), flush=True)
    callbacks = [keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05), unhurried()]
    strike = injection.Strike.of(sys.argv[1:], factor)
    if strike is not None:
        callbacks.append(injection.AtStep(strike, STEPS_PER_EPOCH))
    checkpoint = hvdtrain.Checkpoint("saved", every=7, keep=4)
    trainer.fit(x, y, batch=BATCH, epochs=EPOCHS, checkpoint=checkpoint, callbacks=callbacks, verbose=0)
    show(model)


if __name__ == "__main__":
    main()
