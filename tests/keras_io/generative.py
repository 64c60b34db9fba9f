"""Examples of generative deep learning."""

import keras
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, Training, batch_normalization, classes, images


def variational_autoencoder():
    """VAE: a `train_step` with a sum and means, a sampling layer with a SeedGenerator."""

    class Sampling(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, inputs):
            z_mean, z_log_var = inputs
            batch = ops.shape(z_mean)[0]
            dim = ops.shape(z_mean)[1]
            epsilon = keras.random.normal(shape=(batch, dim), seed=self.seed_generator)
            return z_mean + ops.exp(0.5 * z_log_var) * epsilon

    encoder_inputs = keras.Input(shape=(8, 8, 1))
    x = layers.Conv2D(4, 3, activation="relu", strides=2, padding="same")(encoder_inputs)
    x = layers.Dense(6, activation="relu")(layers.Flatten()(x))
    z_mean, z_log_var = layers.Dense(2, name="z_mean")(x), layers.Dense(2, name="z_log_var")(x)
    encoder = keras.Model(encoder_inputs, [z_mean, z_log_var, Sampling()([z_mean, z_log_var])], name="encoder")
    latent_inputs = keras.Input(shape=(2,))
    x = layers.Reshape((4, 4, 4))(layers.Dense(4 * 4 * 4, activation="relu")(latent_inputs))
    x = layers.Conv2DTranspose(4, 3, activation="relu", strides=2, padding="same")(x)
    decoder = keras.Model(latent_inputs, layers.Conv2DTranspose(1, 3, activation="sigmoid", padding="same")(x))

    class VAE(keras.Model):
        def __init__(self, encoder, decoder, **kwargs):
            super().__init__(**kwargs)
            self.encoder = encoder
            self.decoder = decoder
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
            self.kl_loss_tracker = keras.metrics.Mean(name="kl_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.kl_loss_tracker]

        def train_step(self, data):
            with tf.GradientTape() as tape:
                z_mean, z_log_var, z = self.encoder(data)
                reconstruction = self.decoder(z)
                reconstruction_loss = ops.mean(
                    ops.sum(keras.losses.binary_crossentropy(data, reconstruction), axis=(1, 2))
                )
                kl_loss = -0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var))
                kl_loss = ops.mean(ops.sum(kl_loss, axis=1))
                total_loss = reconstruction_loss + kl_loss
            grads = tape.gradient(total_loss, self.trainable_weights)
            self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.reconstruction_loss_tracker.update_state(reconstruction_loss)
            self.kl_loss_tracker.update_state(kl_loss)
            return {
                "loss": self.total_loss_tracker.result(),
                "reconstruction_loss": self.reconstruction_loss_tracker.result(),
                "kl_loss": self.kl_loss_tracker.result(),
            }

    vae = VAE(encoder, decoder)
    vae.compile(optimizer=keras.optimizers.Adam())
    return Training(model=vae, x=images(8))


def dcgan_pieces():
    discriminator = keras.Sequential(
        [
            keras.Input(shape=(8, 8, 1)),
            layers.Conv2D(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(1, activation="sigmoid"),
        ],
        name="discriminator",
    )
    generator = keras.Sequential(
        [
            keras.Input(shape=(5,)),
            layers.Dense(4 * 4 * 3),
            layers.Reshape((4, 4, 3)),
            layers.Conv2DTranspose(4, kernel_size=4, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, kernel_size=5, padding="same", activation="sigmoid"),
        ],
        name="generator",
    )
    return discriminator, generator


def dcgan():
    """DCGAN: two optimizers, real and made images in one batch, noise added to the labels."""

    class GAN(keras.Model):
        def __init__(self, discriminator, generator, latent_dim):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.latent_dim = latent_dim
            self.seed_generator = keras.random.SeedGenerator(1337)

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn
            self.d_loss_metric = keras.metrics.Mean(name="d_loss")
            self.g_loss_metric = keras.metrics.Mean(name="g_loss")

        @property
        def metrics(self):
            return [self.d_loss_metric, self.g_loss_metric]

        def train_step(self, real_images):
            batch_size = ops.shape(real_images)[0]
            random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
            generated_images = self.generator(random_latent_vectors)
            combined_images = ops.concatenate([generated_images, real_images], axis=0)
            labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
            labels += 0.05 * tf.random.uniform(tf.shape(labels), dtype="float64")
            with tf.GradientTape() as tape:
                predictions = self.discriminator(combined_images)
                d_loss = self.loss_fn(labels, predictions)
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
            random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
            misleading_labels = ops.zeros((batch_size, 1))
            with tf.GradientTape() as tape:
                predictions = self.discriminator(self.generator(random_latent_vectors))
                g_loss = self.loss_fn(misleading_labels, predictions)
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
            self.d_loss_metric.update_state(d_loss)
            self.g_loss_metric.update_state(g_loss)
            return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}

    gan = GAN(*dcgan_pieces(), latent_dim=5)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.001),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.001),
        loss_fn=keras.losses.BinaryCrossentropy(),
    )
    return Training(model=gan, x=tf.data.Dataset.from_tensor_slices(images(8)).batch(BATCH))


def gan_guide():
    """GAN of the guide on `train_step`: the same with noise by tf.random alone."""

    class GAN(keras.Model):
        def __init__(self, discriminator, generator, latent_dim):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.latent_dim = latent_dim
            self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
            self.g_loss_tracker = keras.metrics.Mean(name="g_loss")

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn

        def train_step(self, real_images):
            if isinstance(real_images, tuple):
                real_images = real_images[0]
            batch_size = tf.shape(real_images)[0]
            random_latent_vectors = tf.random.normal(shape=(batch_size, self.latent_dim))
            generated_images = self.generator(random_latent_vectors)
            combined_images = tf.concat([generated_images, real_images], axis=0)
            labels = tf.concat([tf.ones((batch_size, 1)), tf.zeros((batch_size, 1))], axis=0)
            labels += 0.05 * tf.random.uniform(tf.shape(labels))
            with tf.GradientTape() as tape:
                d_loss = self.loss_fn(labels, self.discriminator(combined_images))
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply(grads, self.discriminator.trainable_weights)
            random_latent_vectors = tf.random.normal(shape=(batch_size, self.latent_dim))
            with tf.GradientTape() as tape:
                predictions = self.discriminator(self.generator(random_latent_vectors))
                g_loss = self.loss_fn(tf.zeros((batch_size, 1)), predictions)
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply(grads, self.generator.trainable_weights)
            self.d_loss_tracker.update_state(d_loss)
            self.g_loss_tracker.update_state(g_loss)
            return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}

    gan = GAN(*dcgan_pieces(), latent_dim=5)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    return Training(model=gan, x=images(8), fit={"validation_data": None})


def conditional_gan():
    """Conditional GAN: labels repeated as channels of images, random labels of the batch's shape."""

    num_classes, size = 3, 8

    class ConditionalGAN(keras.Model):
        def __init__(self, discriminator, generator, latent_dim):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.latent_dim = latent_dim
            self.seed_generator = keras.random.SeedGenerator(1337)
            self.gen_loss_tracker = keras.metrics.Mean(name="generator_loss")
            self.disc_loss_tracker = keras.metrics.Mean(name="discriminator_loss")

        @property
        def metrics(self):
            return [self.gen_loss_tracker, self.disc_loss_tracker]

        def compile(self, d_optimizer, g_optimizer, loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.loss_fn = loss_fn

        def train_step(self, data):
            real_images, one_hot_labels = data
            image_one_hot_labels = one_hot_labels[:, :, None, None]
            image_one_hot_labels = ops.repeat(image_one_hot_labels, repeats=[size * size])
            image_one_hot_labels = ops.reshape(image_one_hot_labels, (-1, size, size, num_classes))
            batch_size = ops.shape(real_images)[0]
            random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
            random_vector_labels = ops.concatenate([random_latent_vectors, one_hot_labels], axis=1)
            generated_images = self.generator(random_vector_labels)
            fake_image_and_labels = ops.concatenate([generated_images, image_one_hot_labels], -1)
            real_image_and_labels = ops.concatenate([real_images, image_one_hot_labels], -1)
            combined_images = ops.concatenate([fake_image_and_labels, real_image_and_labels], axis=0)
            labels = ops.concatenate([ops.ones((batch_size, 1)), ops.zeros((batch_size, 1))], axis=0)
            with tf.GradientTape() as tape:
                predictions = self.discriminator(combined_images)
                d_loss = self.loss_fn(labels, predictions)
            grads = tape.gradient(d_loss, self.discriminator.trainable_weights)
            self.d_optimizer.apply_gradients(zip(grads, self.discriminator.trainable_weights, strict=True))
            random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
            random_vector_labels = ops.concatenate([random_latent_vectors, one_hot_labels], axis=1)
            misleading_labels = ops.zeros((batch_size, 1))
            with tf.GradientTape() as tape:
                fake_images = self.generator(random_vector_labels)
                fake_image_and_labels = ops.concatenate([fake_images, image_one_hot_labels], -1)
                predictions = self.discriminator(fake_image_and_labels)
                g_loss = self.loss_fn(misleading_labels, predictions)
            grads = tape.gradient(g_loss, self.generator.trainable_weights)
            self.g_optimizer.apply_gradients(zip(grads, self.generator.trainable_weights, strict=True))
            self.gen_loss_tracker.update_state(g_loss)
            self.disc_loss_tracker.update_state(d_loss)
            return {"g_loss": self.gen_loss_tracker.result(), "d_loss": self.disc_loss_tracker.result()}

    discriminator = keras.Sequential(
        [
            keras.Input((size, size, 1 + num_classes)),
            layers.Conv2D(4, 3, strides=2, padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ]
    )
    generator = keras.Sequential(
        [
            keras.Input((5 + num_classes,)),
            layers.Dense(4 * 4 * (5 + num_classes)),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((4, 4, 5 + num_classes)),
            layers.Conv2DTranspose(1, 4, strides=2, padding="same", activation="sigmoid"),
        ]
    )
    model = ConditionalGAN(discriminator=discriminator, generator=generator, latent_dim=5)
    model.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
    )
    labels = keras.utils.to_categorical(classes(num_classes), num_classes).astype("float64")
    return Training(model=model, x=images(size), y=labels)


def wgan_gp():
    """WGAN-GP (SyncBatchNormalization): several steps of one network, a penalty on gradients."""

    discriminator, _ = dcgan_pieces()
    generator = keras.Sequential(
        [
            keras.Input((5,)),
            layers.Dense(4 * 4 * 3, use_bias=False),
            batch_normalization(),
            layers.LeakyReLU(0.2),
            layers.Reshape((4, 4, 3)),
            layers.UpSampling2D(),
            layers.Conv2D(1, 3, padding="same", use_bias=False, activation="tanh"),
        ]
    )

    class WGAN(keras.Model):
        def __init__(self, discriminator, generator, latent_dim, discriminator_extra_steps=3, gp_weight=10.0):
            super().__init__()
            self.discriminator = discriminator
            self.generator = generator
            self.latent_dim = latent_dim
            self.d_steps = discriminator_extra_steps
            self.gp_weight = gp_weight
            self.seed_generator = keras.random.SeedGenerator(3)

        def compile(self, d_optimizer, g_optimizer, d_loss_fn, g_loss_fn):
            super().compile()
            self.d_optimizer = d_optimizer
            self.g_optimizer = g_optimizer
            self.d_loss_fn = d_loss_fn
            self.g_loss_fn = g_loss_fn

        def gradient_penalty(self, batch_size, real_images, fake_images):
            alpha = keras.random.uniform([batch_size, 1, 1, 1], 0.0, 1.0, seed=self.seed_generator)
            diff = fake_images - real_images
            interpolated = real_images + alpha * diff
            with tf.GradientTape() as gp_tape:
                gp_tape.watch(interpolated)
                pred = self.discriminator(interpolated, training=True)
            grads = gp_tape.gradient(pred, [interpolated])[0]
            norm = tf.sqrt(tf.reduce_sum(tf.square(grads), axis=[1, 2, 3]))
            return tf.reduce_mean((norm - 1.0) ** 2)

        def train_step(self, real_images):
            if isinstance(real_images, tuple):
                real_images = real_images[0]
            batch_size = tf.shape(real_images)[0]
            for _ in range(self.d_steps):
                random_latent_vectors = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
                with tf.GradientTape() as tape:
                    fake_images = self.generator(random_latent_vectors, training=True)
                    fake_logits = self.discriminator(fake_images, training=True)
                    real_logits = self.discriminator(real_images, training=True)
                    d_cost = self.d_loss_fn(real_img=real_logits, fake_img=fake_logits)
                    gp = self.gradient_penalty(batch_size, real_images, fake_images)
                    d_loss = d_cost + gp * self.gp_weight
                d_gradient = tape.gradient(d_loss, self.discriminator.trainable_variables)
                self.d_optimizer.apply_gradients(zip(d_gradient, self.discriminator.trainable_variables, strict=True))
            random_latent_vectors = keras.random.normal((batch_size, self.latent_dim), seed=self.seed_generator)
            with tf.GradientTape() as tape:
                generated_images = self.generator(random_latent_vectors, training=True)
                g_loss = self.g_loss_fn(self.discriminator(generated_images, training=True))
            gen_gradient = tape.gradient(g_loss, self.generator.trainable_variables)
            self.g_optimizer.apply_gradients(zip(gen_gradient, self.generator.trainable_variables, strict=True))
            return {"d_loss": d_loss, "g_loss": g_loss}

    wgan = WGAN(discriminator, generator, latent_dim=5)
    wgan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0002, beta_1=0.5, beta_2=0.9),
        d_loss_fn=lambda real_img, fake_img: tf.reduce_mean(fake_img) - tf.reduce_mean(real_img),
        g_loss_fn=lambda fake_img: -tf.reduce_mean(fake_img),
    )
    return Training(model=wgan, x=images(8))


def cyclegan():
    """CycleGAN: four networks and optimizers, a persistent tape, images of two datasets that were zipped."""

    class ReflectionPadding2D(layers.Layer):
        def __init__(self, padding=(1, 1), **kwargs):
            self.padding = tuple(padding)
            super().__init__(**kwargs)

        def call(self, input_tensor, mask=None):
            padding_width, padding_height = self.padding
            padding = [[0, 0], [padding_height, padding_height], [padding_width, padding_width], [0, 0]]
            return ops.pad(input_tensor, padding, mode="reflect")

    def generator(name):
        inputs = keras.Input((8, 8, 3))
        x = layers.Conv2D(4, 3, use_bias=False)(ReflectionPadding2D()(inputs))
        x = layers.GroupNormalization(groups=-1)(x)
        x = layers.Activation("relu")(x)
        x = layers.add([x, layers.Conv2D(4, 3)(ReflectionPadding2D()(x))])
        return keras.Model(inputs, layers.Conv2D(3, 3, activation="tanh", padding="same")(x), name=name)

    def discriminator(name):
        inputs = keras.Input((8, 8, 3))
        x = layers.LeakyReLU(0.2)(layers.Conv2D(4, 4, strides=2, padding="same")(inputs))
        return keras.Model(inputs, layers.Conv2D(1, 4, padding="same")(x), name=name)

    class CycleGan(keras.Model):
        def __init__(self, gen_g, gen_f, disc_x, disc_y, lambda_cycle=10.0, lambda_identity=0.5):
            super().__init__()
            self.gen_G, self.gen_F, self.disc_X, self.disc_Y = gen_g, gen_f, disc_x, disc_y
            self.lambda_cycle = lambda_cycle
            self.lambda_identity = lambda_identity

        def call(self, inputs):
            return self.disc_X(inputs), self.disc_Y(inputs), self.gen_G(inputs), self.gen_F(inputs)

        def compile(self, gen_G_optimizer, gen_F_optimizer, disc_X_optimizer, disc_Y_optimizer, gen_loss, disc_loss):
            super().compile()
            self.gen_G_optimizer, self.gen_F_optimizer = gen_G_optimizer, gen_F_optimizer
            self.disc_X_optimizer, self.disc_Y_optimizer = disc_X_optimizer, disc_Y_optimizer
            self.generator_loss_fn, self.discriminator_loss_fn = gen_loss, disc_loss
            self.cycle_loss_fn = keras.losses.MeanAbsoluteError()
            self.identity_loss_fn = keras.losses.MeanAbsoluteError()

        def train_step(self, batch_data):
            real_x, real_y = batch_data
            with tf.GradientTape(persistent=True) as tape:
                fake_y = self.gen_G(real_x, training=True)
                fake_x = self.gen_F(real_y, training=True)
                cycled_x = self.gen_F(fake_y, training=True)
                cycled_y = self.gen_G(fake_x, training=True)
                same_x = self.gen_F(real_x, training=True)
                same_y = self.gen_G(real_y, training=True)
                disc_real_x, disc_fake_x = self.disc_X(real_x, training=True), self.disc_X(fake_x, training=True)
                disc_real_y, disc_fake_y = self.disc_Y(real_y, training=True), self.disc_Y(fake_y, training=True)
                total_loss_g = (
                    self.generator_loss_fn(disc_fake_y)
                    + self.cycle_loss_fn(real_y, cycled_y) * self.lambda_cycle
                    + self.identity_loss_fn(real_y, same_y) * self.lambda_cycle * self.lambda_identity
                )
                total_loss_f = (
                    self.generator_loss_fn(disc_fake_x)
                    + self.cycle_loss_fn(real_x, cycled_x) * self.lambda_cycle
                    + self.identity_loss_fn(real_x, same_x) * self.lambda_cycle * self.lambda_identity
                )
                disc_x_loss = self.discriminator_loss_fn(disc_real_x, disc_fake_x)
                disc_y_loss = self.discriminator_loss_fn(disc_real_y, disc_fake_y)
            for loss, net, optimizer in (
                (total_loss_g, self.gen_G, self.gen_G_optimizer),
                (total_loss_f, self.gen_F, self.gen_F_optimizer),
                (disc_x_loss, self.disc_X, self.disc_X_optimizer),
                (disc_y_loss, self.disc_Y, self.disc_Y_optimizer),
            ):
                grads = tape.gradient(loss, net.trainable_variables)
                optimizer.apply_gradients(zip(grads, net.trainable_variables, strict=True))
            return {"G_loss": total_loss_g, "F_loss": total_loss_f, "D_X_loss": disc_x_loss, "D_Y_loss": disc_y_loss}

    adv_loss_fn = keras.losses.MeanSquaredError()

    def generator_loss_fn(fake):
        return adv_loss_fn(ops.ones_like(fake), fake)

    def discriminator_loss_fn(real, fake):
        return (adv_loss_fn(ops.ones_like(real), real) + adv_loss_fn(ops.zeros_like(fake), fake)) * 0.5

    model = CycleGan(generator("G"), generator("F"), discriminator("X"), discriminator("Y"))
    model.compile(
        *(keras.optimizers.Adam(learning_rate=2e-4, beta_1=0.5) for _ in range(4)),
        gen_loss=generator_loss_fn,
        disc_loss=discriminator_loss_fn,
    )
    horses = tf.data.Dataset.from_tensor_slices(images(8, 3)).batch(BATCH)
    zebras = tf.data.Dataset.from_tensor_slices(images(8, 3, seed=5)).batch(BATCH)
    return Training(model=model, x=tf.data.Dataset.zip((horses, zebras)))


EXAMPLES = (
    variational_autoencoder,
    dcgan,
    gan_guide,
    conditional_gan,
    wgan_gp,
    cyclegan,
)
