"""As examples/elastic/tensorflow2/tensorflow2_keras_mnist_elastic.py: fit, whose rate a reset callback sets."""

import argparse

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from departures import come_and_go

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--epochs", type=int, default=24)
args = parser.parse_args()

hvd.init()

(images, labels), _ = tf.keras.datasets.mnist.load_data(path="mnist-%d.npz" % hvd.rank())
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(10000).batch(16)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(4, [3, 3], strides=4, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)

rate_of_one = 0.001
opt = tf.optimizers.Adam(rate_of_one * hvd.size())
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)

# One step makes the variables of model and optimizer, which the state is to hold.
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)

state = hvd.elastic.KerasState(model, batch=0, epoch=0, batches_done=0, sizes=[], rates=[])


def on_state_reset():
    tf.keras.backend.set_value(state.model.optimizer.lr, rate_of_one * hvd.size())
    # A step as those that have come take it.
    state.model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)


state.register_reset_callbacks([on_state_reset])


class Departures(tf.keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        come_and_go(state.batches_done)
        state.batches_done += 1
        state.sizes = [*state.sizes, hvd.size()]
        state.rates = [*state.rates, float(tf.keras.backend.get_value(self.model.optimizer.lr))]


callbacks = [
    Departures(),
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]
if hvd.rank() == 0:
    callbacks.append(tf.keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset,
        steps_per_epoch=args.steps // hvd.size(),
        epochs=args.epochs - state.epoch,
        callbacks=callbacks,
        verbose=1 if hvd.rank() == 0 else 0,
    )


train(state)
