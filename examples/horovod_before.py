"""A Keras script as Horovod's users have it; horovod_after.py differs by an import.

On Keras 3 its learning-rate callback fails, and without it the ranks train apart.
"""

import keras
import tensorflow as tf

import horovod.tensorflow.keras as hvd

from hvdtrain.data.digits import load_digits

hvd.init()
gpus = tf.config.list_physical_devices("GPU")
if gpus:
    tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")

images, labels = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(2000).batch(64)

model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.001 * hvd.size()))
loss = "sparse_categorical_crossentropy"
model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)  # XLA has no operations of Horovod's

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.001 * hvd.size(), warmup_epochs=2),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("digits-{epoch}.keras"))
verbose = 2 if hvd.rank() == 0 else 0
model.fit(dataset, steps_per_epoch=100 // hvd.size(), epochs=5, callbacks=callbacks, verbose=verbose)
