"""A mixture of experts: each rank holds some of them, and tokens travel to the experts that the router chooses.

    horovodrun -np 2 python examples/experts.py --ep 2

Shows loss and accuracy, 1.0 after five epochs. The experts' loads and what was dropped are in the History and in the
logs of callbacks. Where no token is dropped, one rank with all experts trains the same.
"""

import argparse

import hvdtrain

parser = argparse.ArgumentParser()
parser.add_argument("--ep", type=int, default=1, help="ranks that divide the experts")
parser.add_argument("--epochs", type=int, default=5)
args = parser.parse_args()

hvdtrain.init(mesh={"ep": args.ep})

import keras
import numpy as np
from keras import layers

LENGTH, WORDS, WIDTH = 16, 50, 32
rng = np.random.default_rng(0)
x = rng.integers(0, WORDS, (2048, LENGTH))
y = (x == 7).any(axis=1) ^ (x == 11).any(axis=1)  # one of two words, but not both

tokens = keras.Input((LENGTH,), dtype="int32")
h = layers.Embedding(WORDS, WIDTH)(tokens)
h = h + layers.MultiHeadAttention(2, WIDTH // 2)(h, h)
# Its output is zero for a token that is dropped: the residual connection carries it on.
h = h + hvdtrain.MixtureOfExperts(experts=4, hidden=64, top_k=2)(layers.LayerNormalization()(h))
h = layers.GlobalMaxPooling1D()(h)
model = keras.Model(tokens, layers.Dense(1)(h))

loss = keras.losses.BinaryCrossentropy(from_logits=True)
accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)  # of logits
trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(3e-3), loss, metrics=[accuracy])
trainer.fit(x, y.astype("float32"), batch=64, epochs=args.epochs)
