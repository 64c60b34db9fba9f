"""A table per worker, whose rows travel by alltoall, under a shared top, as in scripts for DLRM."""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--local-batch", type=int, default=16)
args = parser.parse_args()

hvd.init()

rows, width = 20, 4
world_size = hvd.size()
local_batch, global_batch = args.local_batch, args.local_batch * world_size

rng = np.random.default_rng(7)  # the categories of the global batch are known to all
categories = rng.integers(0, rows, (args.steps, global_batch, world_size))
clicks = (categories.sum(axis=-1) % 2).astype("float32")

embedding = tf.Variable(tf.random.normal([rows, width]), name="table_%d" % hvd.rank())
model = tf.keras.Sequential(
    [tf.keras.layers.Dense(16, activation="relu", input_shape=(world_size * width,)), tf.keras.layers.Dense(1)]
)
dense_optimizer = tf.keras.optimizers.SGD(0.1)
table_optimizer = tf.keras.optimizers.SGD(0.1)
hvd.broadcast_variables(model.variables, root_rank=0)


def exchanged(vectors):
    """Send each worker the rows of its samples, and return those of its own samples of all tables."""
    received, _ = hvd.alltoall(vectors, splits=[local_batch] * world_size, ignore_name_scope=True)
    return tf.concat(tf.split(received, world_size, axis=0), axis=1)


@tf.function
def train_step(own_categories, own_clicks):
    with tf.GradientTape() as tape:
        logits = model(exchanged(tf.gather(embedding, own_categories)), training=True)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(own_clicks[:, None], logits)
        loss = tf.reduce_mean(losses)

    tape = hvd.DistributedGradientTape(tape)
    tape.register_local_source(embedding)
    *grads, table_grad = tape.gradient(loss, [*model.trainable_variables, embedding])
    dense_optimizer.apply_gradients(zip(grads, model.trainable_variables))
    table_optimizer.apply_gradients([(table_grad, embedding)])
    return hvd.allreduce(loss)


losses = []
for _ in range(args.steps):
    mine = slice(hvd.rank() * local_batch, (hvd.rank() + 1) * local_batch)
    loss = train_step(tf.constant(categories[0, :, hvd.rank()]), tf.constant(clicks[0, mine]))
    losses.append(float(loss))
