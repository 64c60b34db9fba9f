"""A training that goes on when ranks are lost, and takes in new ones, without a restart.

    echo 'echo localhost:1; echo 127.0.0.1:1' > discover.sh && chmod +x discover.sh
    horovodrun --gloo -np 2 --min-np 1 --max-np 4 --host-discovery-script ./discover.sh \
        --network-interfaces lo python examples/elastic.py --epochs 600

While it trains, for about a minute, kill a rank (kill -9), or let discover.sh print localhost:2 in place of
localhost:1, and watch the lines that say how many ranks there are. The global batch stays that of the first world, and
so does what is learnt. A host that lost a rank is not used again, so one machine needs a name for each rank to lose.
"""

import argparse

import hvdtrain

hvdtrain.init()

import keras

from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
args = parser.parse_args()


class Ranks(keras.callbacks.Callback):
    """`on_train_begin` is called in each world."""

    def on_train_begin(self, logs=None):
        if hvdtrain.rank() == 0:
            ranks = hvdtrain.size()
            print(f"training on {ranks} rank{'s' if ranks > 1 else ''}", flush=True)


images, labels = load_digits()
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
trainer = hvdtrain.Trainer(model, keras.optimizers.Adam(2e-3), loss, metrics=["accuracy"])
# Every 10 steps each rank keeps a copy of the state in memory, to which the others return when one is lost.
trainer.fit(images, labels, batch=60, epochs=args.epochs, callbacks=[Ranks()], elastic=True, commit_every=10)
