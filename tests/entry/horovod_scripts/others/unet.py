"""Batch normalization over all workers, metrics reduced by hand, a checkpoint that only rank 0 restores."""

import argparse
import os

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--model-dir", default="model")
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--learning-rate", type=float, default=0.01)
args = parser.parse_args()

hvd.init()

rng = np.random.default_rng(3)
images = rng.random((64, 8, 8, 1), "float32")
masks = (images > 0.5).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images, masks)).shard(hvd.size(), hvd.rank()).repeat().batch(8)

inputs = tf.keras.Input((8, 8, 1))
down = tf.keras.layers.Conv2D(4, 3, padding="same", use_bias=False)(inputs)
down = hvd.SyncBatchNormalization()(down)
down = tf.keras.layers.ReLU()(down)
up = tf.keras.layers.Concatenate()([down, inputs])
model = tf.keras.Model(inputs, tf.keras.layers.Conv2D(1, 1)(up))

optimizer = tf.keras.optimizers.Adam(learning_rate=args.learning_rate)
loss_metric = tf.keras.metrics.Mean("loss", dtype=tf.float32)
checkpoint = tf.train.Checkpoint(step=tf.Variable(0), optimizer=optimizer, model=model)
manager = tf.train.CheckpointManager(checkpoint, args.model_dir, max_to_keep=1)
if hvd.rank() == 0 and manager.latest_checkpoint:
    checkpoint.restore(manager.latest_checkpoint)


@tf.function
def train_step(features, masks, warmup_batch):
    with tf.GradientTape() as tape:
        logits = model(features, training=True)
        loss = tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(masks, logits))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    # After the first step the optimizer has its variables, also where nothing was restored.
    if warmup_batch:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    loss_metric(loss)


losses = []
for iteration, (features, labels) in enumerate(dataset.take(args.steps)):
    train_step(features, labels, warmup_batch=iteration == 0)
    checkpoint.step.assign_add(1)
    if (iteration + 1) % 10 == 0:
        losses.append(float(hvd.allreduce(loss_metric.result(), average=True)))
        loss_metric.reset_states()

steps_done = hvd.broadcast(checkpoint.step, 0)
if hvd.rank() == 0:
    manager.save()
    assert os.path.exists(manager.latest_checkpoint + ".index")
# Restored on rank 0 alone, the optimizer's count is everybody's.
assert int(hvd.allreduce(optimizer.iterations, op=hvd.Sum)) == hvd.size() * int(optimizer.iterations)
assert int(optimizer.iterations) == int(steps_done)
