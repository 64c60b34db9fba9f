"""Two models and two optimizers in one step, each with a tape of its own, as in scripts for DCGAN and pix2pix."""

import argparse

import horovod.tensorflow as hvd
import tensorflow as tf
from tensorflow.keras import layers

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--batch-size", type=int, default=32)
args = parser.parse_args()

hvd.init()

(images, _), _ = tf.keras.datasets.mnist.load_data("mnist-%d.npz" % hvd.rank())
images = (images[..., None].astype("float32") - 127.5) / 127.5
dataset = tf.data.Dataset.from_tensor_slices(images).shard(hvd.size(), hvd.rank())
dataset = dataset.repeat().shuffle(10000).batch(args.batch_size, drop_remainder=True)

noise_dim = 8
generator = tf.keras.Sequential(
    [
        layers.Dense(14 * 14, use_bias=False, input_shape=(noise_dim,)),
        layers.LeakyReLU(),
        layers.Reshape((14, 14, 1)),
        layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="tanh"),
    ]
)
discriminator = tf.keras.Sequential(
    [
        layers.Conv2D(4, 5, strides=4, padding="same", input_shape=[28, 28, 1]),
        layers.LeakyReLU(),
        layers.Flatten(),
        layers.Dense(1),
    ]
)

cross_entropy = tf.keras.losses.BinaryCrossentropy(from_logits=True)
generator_optimizer = tf.keras.optimizers.Adam(1e-4 * hvd.size(), beta_1=0.5)
discriminator_optimizer = tf.keras.optimizers.Adam(3e-3 * hvd.size(), beta_1=0.5)


@tf.function
def train_step(images):
    noise = tf.random.normal([args.batch_size, noise_dim])

    with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
        generated = generator(noise, training=True)
        real_output = discriminator(images, training=True)
        fake_output = discriminator(generated, training=True)
        gen_loss = cross_entropy(tf.ones_like(fake_output), fake_output)
        disc_loss = cross_entropy(tf.ones_like(real_output), real_output)
        disc_loss += cross_entropy(tf.zeros_like(fake_output), fake_output)

    gen_tape = hvd.DistributedGradientTape(gen_tape)
    disc_tape = hvd.DistributedGradientTape(disc_tape)
    gen_gradients = gen_tape.gradient(gen_loss, generator.trainable_variables)
    disc_gradients = disc_tape.gradient(disc_loss, discriminator.trainable_variables)
    generator_optimizer.apply_gradients(zip(gen_gradients, generator.trainable_variables))
    discriminator_optimizer.apply_gradients(zip(disc_gradients, discriminator.trainable_variables))

    return gen_loss, disc_loss


losses = []
for step, batch in enumerate(dataset.take(args.steps // hvd.size())):
    gen_loss, disc_loss = train_step(batch)
    if step == 0:
        hvd.broadcast_variables(generator.variables, root_rank=0)
        hvd.broadcast_variables(generator_optimizer.variables(), root_rank=0)
        hvd.broadcast_variables(discriminator.variables, root_rank=0)
        hvd.broadcast_variables(discriminator_optimizer.variables(), root_rank=0)
    losses.append(float(disc_loss))
    if step % 100 == 0 and hvd.rank() == 0:
        print("Step %d: generator %.4f, discriminator %.4f" % (step, gen_loss, disc_loss))
