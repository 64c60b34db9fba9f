"""fit with schedules, early stopping, a log and a barrier, as in scripts of MLPerf HPC and of computing centres."""

import argparse
import json
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="results")
parser.add_argument("--epochs", type=int, default=16)
args = parser.parse_args()


class EpochTimingCallback(tf.keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.rates = []

    def on_epoch_begin(self, epoch, logs=None):
        self.rates.append(float(tf.keras.backend.get_value(self.model.optimizer.lr)))


def get_dataset(n_samples, batch_size, seed):
    rng = np.random.default_rng(seed)
    cubes = rng.random((n_samples, 6, 6, 6, 1), "float32")
    parameters = cubes.mean(axis=(1, 2, 3)) + 3 * cubes[:, 0, 0, 0]
    data = tf.data.Dataset.from_tensor_slices((cubes, parameters)).shard(hvd.size(), hvd.rank())
    return data.batch(batch_size, drop_remainder=True).prefetch(2)


def build_model():
    model = tf.keras.models.Sequential()
    model.add(layers.Input((6, 6, 6, 1)))
    model.add(layers.Conv3D(4, 2))
    model.add(layers.LeakyReLU())
    model.add(layers.MaxPool3D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(1))
    return model


hvd.init()

if hvd.rank() == 0:
    os.makedirs(args.output_dir, exist_ok=True)
hvd.allreduce([0], name="Barrier")
assert os.path.isdir(args.output_dir)

train_data, valid_data = get_dataset(64, 8, seed=1), get_dataset(32, 8, seed=2)
model = build_model()

scaled_lr = 0.02 * hvd.size()
opt = tf.keras.optimizers.SGD(learning_rate=scaled_lr, momentum=0.9, clipnorm=5.0)
opt = hvd.DistributedOptimizer(opt, gradient_predivide_factor=2.0)
model.compile(optimizer=opt, loss="mse", metrics=["mean_absolute_error"])
if hvd.rank() == 0:
    model.summary()

timing = EpochTimingCallback()
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=scaled_lr, warmup_epochs=2, steps_per_epoch=4, verbose=1),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=scaled_lr, multiplier=0.5, start_epoch=2),
    timing,
    tf.keras.callbacks.EarlyStopping(patience=8, restore_best_weights=True),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.CSVLogger(os.path.join(args.output_dir, "history.csv")))

history = model.fit(
    train_data, validation_data=valid_data, epochs=args.epochs, callbacks=callbacks, verbose=2 if hvd.rank() == 0 else 0
)
if hvd.rank() == 0:
    with open(os.path.join(args.output_dir, "rates.json"), "w") as file:
        json.dump(timing.rates, file)
# Up over two epochs, and down again.
assert timing.rates[1] < timing.rates[2] > timing.rates[-1], timing.rates
