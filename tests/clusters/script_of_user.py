"""A script as users write it: trains, goes on from a checkpoint, and keeps the weights on the first rank."""

import keras
import numpy as np

import hvdtrain

hvdtrain.init()
draw = np.random.default_rng(0)
x = draw.normal(size=(150, 12)).astype("float32")
y = (x.sum(1) > 0).astype("int32")  # 150 samples in batches of 16: the last of an epoch has 6


def make_trainer():
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, hvdtrain.Trainer(model, keras.optimizers.SGD(0.05, momentum=0.9), loss)


def flat(model):
    return np.concatenate([weight.numpy().ravel() for weight in model.weights])


stopping = keras.callbacks.EarlyStopping(monitor="loss", patience=5, restore_best_weights=True)
model, trainer = make_trainer()
begun = flat(model)
trainer.fit(x, y, batch=16, epochs=1, callbacks=[stopping], checkpoint="checkpoints")
model, trainer = make_trainer()
assert trainer.resume("checkpoints") is not None  # which only the first rank's host has
trainer.fit(x, y, batch=16, epochs=2, callbacks=[stopping], checkpoint="checkpoints")
other, backed_up = make_trainer()
backed_up.fit(x, y, batch=16, epochs=2, callbacks=[keras.callbacks.BackupAndRestore("backup")])
if hvdtrain.rank() == 0:
    np.savez("weights.npz", begun=begun, trained=flat(model), backed_up=flat(other))
