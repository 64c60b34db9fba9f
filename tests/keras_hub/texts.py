"""Usage: (launcher) python texts.py: train a task of KerasHub on strings and labels, as on what it makes of them."""

import keras
import keras_hub
import numpy as np

import hvdtrain

hvdtrain.init()
models = keras_hub.models
WORDS = ["the", "cat", "sat", "on", "mat", "a", "dog", "ran", "far", "home"]
LENGTH, BATCH = 8, 4


def build():
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    tokenizer = models.BertTokenizer(vocabulary=["[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", *WORDS])
    sizes = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16, "dropout": 0.0}
    model = models.BertTextClassifier(
        models.BertBackbone(vocabulary_size=5 + len(WORDS), max_sequence_length=LENGTH, **sizes),
        num_classes=2,
        preprocessor=models.BertTextClassifierPreprocessor(tokenizer, sequence_length=LENGTH),
        dropout=0.0,
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss=loss, metrics=["accuracy"])
    return model


rng = np.random.default_rng(0)
texts = [" ".join(rng.choice(WORDS, 4)) for _ in range(10)]
labels = rng.integers(0, 2, len(texts))
plain = build()
tokens = {name: np.asarray(value) for name, value in plain.preprocess_samples(texts, labels)[0].items()}
plain.preprocessor = None
history = plain.fit(tokens, labels, batch_size=BATCH, shuffle=False, verbose=0)
trainer = hvdtrain.Trainer(build())
ours = trainer.fit(texts, labels, batch=BATCH, validation_data=(texts[:3], labels[:3]), verbose=0)
for name, values in history.history.items():
    np.testing.assert_allclose(ours.history[name], values, rtol=1e-6)
np.testing.assert_allclose(trainer.predict(texts), plain.predict(tokens, verbose=0), rtol=1e-5, atol=1e-6)
theirs = plain.evaluate(tokens, labels, verbose=0)
np.testing.assert_allclose(trainer.evaluate(texts, labels, verbose=0), theirs, rtol=1e-6)
print("EQUAL", flush=True)
