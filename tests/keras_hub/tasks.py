"""Usage: (launcher) python tasks.py AXES NAME...: train KerasHub's decoders as they are, split along AXES.

AXES are those of `hvdtrain.init(parallel=…)`, or zero=3. Prints RESULT and a JSON object for each.
"""

import json
import sys

import keras
import keras_hub
import numpy as np

import hvdtrain

models = keras_hub.models
keras.config.set_floatx("float64")
SIZES = {"vocabulary_size": 32, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 24}
GROUPED = {**SIZES, "num_query_heads": 4, "num_key_value_heads": 2}
SAMPLES, LENGTH, BATCH, EPOCHS = 10, 6, 4, 2
DECODERS = {
    "llama": lambda: models.LlamaCausalLM(models.LlamaBackbone(**GROUPED), preprocessor=None),
    "mistral": lambda: models.MistralCausalLM(models.MistralBackbone(sliding_window=4, **GROUPED), preprocessor=None),
    "gemma": lambda: models.GemmaCausalLM(models.GemmaBackbone(head_dim=4, **GROUPED), preprocessor=None),
    "qwen": lambda: models.QwenCausalLM(models.QwenBackbone(**GROUPED), preprocessor=None),
    "phi": lambda: models.Phi3CausalLM(models.Phi3Backbone(**GROUPED), preprocessor=None),
    "gpt2": lambda: models.GPT2CausalLM(
        models.GPT2Backbone(num_heads=4, max_sequence_length=LENGTH, dropout=0.0, **SIZES), preprocessor=None
    ),
}


def data():
    rng = np.random.default_rng(0)
    mask = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, SAMPLES)[:, None]
    tokens = rng.integers(1, 32, (SAMPLES, LENGTH)).astype("int32")
    targets = rng.integers(0, 32, (SAMPLES, LENGTH))
    return {"token_ids": tokens, "padding_mask": mask.astype("int32")}, targets, mask.astype("float64")


def build(name):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = DECODERS[name]()
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    return model


def trained(axes, name):
    if axes.startswith("zero"):
        return hvdtrain.Trainer(build(name), zero=int(axes.removeprefix("zero=")))
    rules = "keras_hub" if "tp" in axes else None
    return hvdtrain.Trainer(hvdtrain.parallelize(lambda: build(name), rules))


def main(axes, names):
    hvdtrain.init(parallel=None if axes.startswith("zero") else axes)
    x, y, weights = data()
    fit = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "sample_weight": weights}
    for name in names:
        model = build(name)
        history = model.fit(x, y, batch_size=BATCH, **fit).history
        predicted = model.predict(x, batch_size=BATCH, verbose=0)
        trainer = trained(axes, name)
        ours = trainer.fit(x, y, batch=BATCH, **fit).history
        figures = {key: float(np.abs(np.subtract(ours[key], history[key])).max()) for key in history}
        figures["predict"] = float(np.abs(trainer.predict(x, batch=BATCH) - predicted).max())
        if hvdtrain.rank() == 0:
            print("RESULT", json.dumps({"name": name, **figures}), flush=True)


main(sys.argv[1], sys.argv[2:])
