"""Usage: (launcher) python tasks.py AXES FOLDER NAME...: train KerasHub's decoders as they are, split along AXES.

AXES are those of `hvdtrain.init(parallel=…)`, or zero=3; NAME+ is the backbone below layers of the user's own. Prints
RESULT and a JSON object for each: how far it is from one process, or why it is refused. AXES "none" trains them in one
process before, each rank some of them, and leaves in FOLDER what they come to.
"""

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from decoders import LENGTH, VOCABULARY, backbone_below_own_layers, task

import hvdtrain
from hvdtrain.config.errors import ConfigError

keras.config.set_floatx("float64")
tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
SAMPLES, BATCH = 10, 4
FIT = {"epochs": 2, "shuffle": False, "verbose": 0}


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


def train_alone(folder, names):
    """Train this rank's share of the models by Keras."""
    hvdtrain.init()
    x, y, weights = data()
    for name in names[hvdtrain.rank() :: hvdtrain.size()]:
        model = build(name)
        history = model.fit(x, y, batch_size=BATCH, sample_weight=weights, **FIT).history
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        np.savez(folder / f"{name}.npz", predict=predicted, weights=flat(model), **history)


def flat(model):
    return np.concatenate([np.ravel(weight) for weight in model.weights])


def predicted_by_keras(name, trainer, x):
    """Predictions of Keras with a trainer's weights."""
    model = build(name)
    model.set_weights([np.asarray(weight) for weight in trainer.model.weights])
    return model.predict(x, batch_size=BATCH, verbose=0)


def main(axes, folder, names):
    hvdtrain.init(parallel=None if axes.startswith("zero") else axes)
    x, y, weights = data()
    for name in names:
        try:
            trainer = trained(axes, name)
            ours = trainer.fit(x, y, batch=BATCH, sample_weight=weights, **FIT).history
            predicted = trainer.predict(x, batch=BATCH)
        except ConfigError as error:
            found = {"refused": str(error)}
        else:
            alone = dict(np.load(folder / f"{name}.npz"))
            mine = {**ours, "predict": predicted}
            if axes.startswith("zero"):
                trainer.consolidate()
                mine["weights"], alone["predict"] = flat(trainer.model), predicted_by_keras(name, trainer, x)
            found = {key: float(np.abs(np.subtract(mine[key], alone[key])).max()) for key in mine}
        if hvdtrain.rank() == 0:
            print("RESULT", json.dumps({"name": name, **found}), flush=True)


if sys.argv[1] == "none":
    train_alone(Path(sys.argv[2]), sys.argv[3:])
else:
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
