"""Usage: (launcher) python tasks.py AXES NAME...: train KerasHub's decoders as they are, split along AXES.

AXES are those of `hvdtrain.init(parallel=…)`, or zero=3; NAME+ is the backbone below layers of the user's own. Prints
RESULT and a JSON object for each: how far it is from one process, or why it is refused.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf
from decoders import LENGTH, VOCABULARY, backbone_below_own_layers, task

import hvdtrain
from hvdtrain.config.errors import ConfigError

keras.config.set_floatx("float64")
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
SAMPLES, BATCH, EPOCHS = 10, 4, 2


def data():
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, SAMPLES)[:, None]
    tokens = rng.integers(1, VOCABULARY, (SAMPLES, LENGTH)).astype("int32")
    targets = rng.integers(0, VOCABULARY, (SAMPLES, LENGTH))
    return {"token_ids": tokens, "padding_mask": mask.astype("int32")}, targets, mask.astype("float64")


def build(name):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = backbone_below_own_layers(name[:-1]) if name.endswith("+") else task(name)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
        jit_compile=False,  # of Keras' steps: XLA takes longer than all else
    )
    return model


def trained(axes, name):
    if axes.startswith("zero"):
        return hvdtrain.Trainer(build(name), zero=int(axes.removeprefix("zero=")))
    if "tp" in axes:
        return hvdtrain.Trainer(hvdtrain.parallelize(lambda: build(name), "keras_hub"))
    return hvdtrain.Trainer(lambda: build(name))


def main(axes, names):
    hvdtrain.init(parallel=None if axes.startswith("zero") else axes)
    x, y, weights = data()
    fit = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "sample_weight": weights}
    for name in names:
        try:
            trainer = trained(axes, name)
            ours = trainer.fit(x, y, batch=BATCH, **fit).history
            predicted = trainer.predict(x, batch=BATCH)
        except ConfigError as error:
            found = {"refused": str(error)}
        else:
            found = {} if hvdtrain.rank() else deviations(build(name), x, y, fit, ours, predicted)
        if hvdtrain.rank() == 0:
            print("RESULT", json.dumps({"name": name, **found}), flush=True)


def deviations(model, x, y, fit, ours, predicted):
    """Return how far a training and its predictions are from those of `model` in one process."""
    history = model.fit(x, y, batch_size=BATCH, **fit).history
    assert history.keys() == ours.keys()
    found = {key: float(np.abs(np.subtract(ours[key], history[key])).max()) for key in history}
    return {**found, "predict": float(np.abs(predicted - model.predict(x, batch_size=BATCH, verbose=0)).max())}


main(sys.argv[1], sys.argv[2:])
