"""A loop of your own: tape, accumulation over microbatches, and mixed precision with loss scaling.

    horovodrun -np 2 python examples/own_loop.py

Shows the mean loss of each epoch. Every second microbatch exchanges gradients and updates the weights; a step whose
gradients overflow in float16 on any rank is skipped by all.
"""

import argparse

import hvdtrain

hvdtrain.init()

import keras
import tensorflow as tf

from hvdtrain.data.digits import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--batch", type=int, default=32, help="samples of a microbatch, over all ranks")
args = parser.parse_args()

keras.config.set_dtype_policy("mixed_float16")  # computes in float16; weights stay float32
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, dtype="float32"),  # logits in full precision
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
optimizer = hvdtrain.LossScaleOptimizer(keras.optimizers.Adam(2e-3))
accumulator = hvdtrain.GradientAccumulator(model.trainable_variables, steps=2)

optimizer.build(model.trainable_variables)  # creates its slots, so that they are broadcast, too
hvdtrain.broadcast_variables(model.variables + optimizer.variables)

images, labels = load_digits()
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1)
dataset = hvdtrain.shard(dataset, batch=args.batch, drop_remainder=True)  # this rank's part of each batch


@tf.function
def microbatch(x, y):
    with tf.GradientTape() as tape:  # a plain tape: the accumulator exchanges
        value = loss(y, model(x, training=True))
        scaled = optimizer.scale_loss(value)
    accumulator.step(tape.gradient(scaled, model.trainable_variables), optimizer)
    return value


for epoch in range(args.epochs):
    values = [microbatch(x, y) for x, y in dataset]
    mean = float(hvdtrain.allreduce(tf.reduce_mean(tf.stack(values))))
    if hvdtrain.rank() == 0:
        print(f"epoch {epoch + 1}  loss {mean:.4f}", flush=True)
accumulator.flush(optimizer)  # applies what an incomplete pair has left
