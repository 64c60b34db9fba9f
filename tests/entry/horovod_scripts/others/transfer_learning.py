"""A frozen base under a new head, then both with a smaller rate, as in tutorials on transfer learning."""

import argparse

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf
from tensorflow.keras import backend as K

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

hvd.init()

(x_train, y_train), _ = tf.keras.datasets.mnist.load_data("mnist-%d.npz" % hvd.rank())
x_train = (x_train[hvd.rank() :: hvd.size(), ..., None] / 255.0).astype("float32")
y_train = y_train[hvd.rank() :: hvd.size()]

base = tf.keras.Sequential(
    [tf.keras.layers.Conv2D(4, 3, strides=2, activation="relu", input_shape=(28, 28, 1)), tf.keras.layers.Flatten()]
)
base.trainable = False
model = tf.keras.Sequential([base, tf.keras.layers.Dense(10)])
frozen = [np.array(weight) for weight in base.get_weights()]

loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
opt = hvd.DistributedOptimizer(tf.keras.optimizers.RMSprop(0.001 * hvd.size()))
model.compile(optimizer=opt, loss=loss, metrics=["accuracy"])


class HalveTheRate(tf.keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        rate = float(K.get_value(self.model.optimizer.lr))
        K.set_value(self.model.optimizer.lr, rate / 2)
        logs["lr"] = rate / 2


broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
history = model.fit(
    x_train, y_train, batch_size=32, epochs=args.epochs, callbacks=[broadcast, HalveTheRate()], verbose=0
)
np.testing.assert_allclose(float(K.get_value(opt.lr)), 0.001 * hvd.size() / 2**args.epochs, rtol=1e-5)
# What was frozen is what rank 0 began with.
for mine, weight in zip(frozen, base.get_weights()):
    np.testing.assert_array_equal(weight, hvd.broadcast(mine, 0).numpy())

base.trainable = True
opt = hvd.DistributedOptimizer(tf.keras.optimizers.RMSprop(1e-4 * hvd.size()))
model.compile(optimizer=opt, loss=loss, metrics=["accuracy"])
model.fit(
    x_train,
    y_train,
    batch_size=32,
    epochs=1,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
    verbose=0,
)

predictions = hvd.allgather(model.predict(x_train[: 3 + hvd.rank()], verbose=0))
assert predictions.shape == (7, 10), predictions.shape
