"""Embeddings, mixed precision with a scaled loss and clipped gradients, as in scripts that pretrain BERT."""

import argparse

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--use-fp16", action="store_true")
args = parser.parse_args()

hvd.init()

if args.use_fp16:
    tf.keras.mixed_precision.set_global_policy("mixed_float16")

vocabulary, length = 50, 8
rng = np.random.default_rng(100 + hvd.rank())
tokens = rng.integers(0, vocabulary, (256, length))
targets = tokens % 5
dataset = tf.data.Dataset.from_tensor_slices((tokens, targets)).repeat().batch(16)


class Encoder(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tf.keras.layers.Embedding(vocabulary, 16)
        self.attention = tf.keras.layers.MultiHeadAttention(2, 8)
        self.norm = tf.keras.layers.LayerNormalization()
        self.head = tf.keras.layers.Dense(5, dtype="float32")

    def call(self, tokens, training=False):
        x = self.embedding(tokens)
        x = self.norm(x + self.attention(x, x, training=training))
        return self.head(x)


model = Encoder()
optimizer = tf.keras.optimizers.Adam(1e-2)
if args.use_fp16:
    optimizer = tf.keras.mixed_precision.LossScaleOptimizer(optimizer)
train_loss = tf.keras.metrics.Mean("training_loss", dtype=tf.float32)


@tf.function
def train_step(tokens, targets):
    with tf.GradientTape() as tape:
        logits = model(tokens, training=True)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))
        scaled_loss = optimizer.get_scaled_loss(loss) if args.use_fp16 else loss

    tape = hvd.DistributedGradientTape(
        tape, sparse_as_dense=True, compression=hvd.Compression.fp16 if args.use_fp16 else hvd.Compression.none
    )
    training_vars = model.trainable_variables
    grads = tape.gradient(scaled_loss, training_vars)
    if args.use_fp16:
        grads = optimizer.get_unscaled_gradients(grads)
    (grads, _) = tf.clip_by_global_norm(grads, clip_norm=1.0)
    optimizer.apply_gradients(zip(grads, training_vars))
    train_loss.update_state(hvd.allreduce(loss, name="loss"))


losses = []
for step, (batch, labels) in enumerate(dataset.take(args.steps)):
    train_step(batch, labels)
    if step == 0:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables(), root_rank=0)
    if (step + 1) % 5 == 0:
        losses.append(float(train_loss.result()))
        train_loss.reset_states()
        if hvd.rank() == 0:
            print("Step %d: loss %.4f" % (step, losses[-1]))
