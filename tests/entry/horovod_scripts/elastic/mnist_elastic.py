"""As examples/elastic/tensorflow2/tensorflow2_mnist_elastic.py: a tape, and a commit after every batch."""

import argparse

import horovod.tensorflow as hvd
import tensorflow as tf
from departures import come_and_go

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=10000)
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
loss = tf.losses.SparseCategoricalCrossentropy()

rate_of_one = 0.001
opt = tf.optimizers.Adam(rate_of_one * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    if allreduce:
        tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables))
    return loss_value


# A step of each worker alone makes the variables that the state is to hold.
for images, labels in dataset.take(1):
    training_step(images, labels, allreduce=False)


@hvd.elastic.run
def train(state):
    start_batch = state.batch

    for batch_idx, (images, labels) in enumerate(dataset.skip(state.batch).take(args.batches - start_batch)):
        state.batch = start_batch + batch_idx
        loss_value = training_step(images, labels)
        come_and_go(state.batch)
        state.sizes = [*state.sizes, hvd.size()]
        state.rates = [*state.rates, float(opt.lr)]

        if state.batch % 10 == 0 and hvd.local_rank() == 0:
            print("Step #%d\tLoss: %.6f" % (state.batch, loss_value))

        state.commit()


def on_state_reset():
    opt.lr.assign(rate_of_one * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0, sizes=[], rates=[])
state.register_reset_callbacks([on_state_reset])

train(state)

checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
if hvd.rank() == 0:
    checkpoint.save("./checkpoints")
