"""A recommender whose embedding tables are divided among the ranks; the layers above them are trained data parallel.

    horovodrun -np 2 python examples/recommender.py

Shows the loss and how many ratings are told right. Each rank holds half of the rows of both tables, and of Adam's
moments for them. It trains as whole tables on one rank do.
"""

import argparse

import hvdtrain

hvdtrain.init()

import keras
import numpy as np
from keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--users", type=int, default=20_000)
parser.add_argument("--films", type=int, default=5_000)
parser.add_argument("--ratings", type=int, default=50_000)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--sharding", default="row", choices=["row", "column", "table"])
args = parser.parse_args()

# Made-up ratings: users and films have three traits each, and a film is liked whose traits are those of the user.
rng = np.random.default_rng(0)
users, films = rng.integers(0, args.users, args.ratings), rng.integers(0, args.films, args.ratings)
traits = rng.standard_normal((args.users, 3)), rng.standard_normal((args.films, 3))
liked = ((traits[0][users] * traits[1][films]).sum(axis=1) > 0).astype("float32")

user, film = keras.Input((1,), dtype="int32", name="user"), keras.Input((1,), dtype="int32", name="film")
of_user = hvdtrain.ShardedEmbedding(args.users, 16, args.sharding, name="users")(user)
of_film = hvdtrain.ShardedEmbedding(args.films, 16, args.sharding, name="films")(film)
x = layers.Flatten()(layers.Concatenate()([of_user, of_film, of_user * of_film]))
model = keras.Model({"user": user, "film": film}, layers.Dense(1)(layers.Dense(64, activation="relu")(x)))

loss = keras.losses.BinaryCrossentropy(from_logits=True)
accuracy = keras.metrics.BinaryAccuracy(threshold=0.0)  # of logits
trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(3e-3), loss, metrics=[accuracy])
trainer.fit({"user": users[:, None], "film": films[:, None]}, liked, batch=256, epochs=args.epochs)
