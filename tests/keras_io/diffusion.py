"""More examples of generative deep learning: diffusion, flows, style and sound."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, EPOCHS, Loop, Training, batch_normalization, images, numbers


def ddim():
    """Denoising diffusion implicit models (SyncBatchNormalization): random times, an averaged network."""

    def sinusoidal_embedding(x):
        frequencies = ops.exp(ops.linspace(ops.log(1.0), ops.log(1000.0), 2))
        angular_speeds = ops.cast(2.0 * np.pi * frequencies, "float64")
        return ops.concatenate([ops.sin(angular_speeds * x), ops.cos(angular_speeds * x)], axis=3)

    def get_network():
        noisy_images, noise_variances = keras.Input((8, 8, 3)), keras.Input((1, 1, 1))
        e = layers.Lambda(sinusoidal_embedding, output_shape=(1, 1, 4))(noise_variances)
        e = layers.UpSampling2D(size=8, interpolation="nearest")(e)
        x = layers.Concatenate()([layers.Conv2D(4, kernel_size=1)(noisy_images), e])
        x = layers.Conv2D(4, 3, padding="same", activation="swish")(batch_normalization(center=False, scale=False)(x))
        return keras.Model(
            [noisy_images, noise_variances], layers.Conv2D(3, 1, kernel_initializer="zeros")(x), name="residual_unet"
        )

    class DiffusionModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.normalizer = layers.Normalization()
            self.network = get_network()
            self.ema_network = get_network()
            self.ema_network.set_weights(self.network.get_weights())
            self.seeds = keras.random.SeedGenerator(3)

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.noise_loss_tracker = keras.metrics.Mean(name="n_loss")
            self.image_loss_tracker = keras.metrics.Mean(name="i_loss")

        @property
        def metrics(self):
            return [self.noise_loss_tracker, self.image_loss_tracker]

        def diffusion_schedule(self, diffusion_times):
            start_angle, end_angle = np.arccos(0.95), np.arccos(0.02)
            diffusion_angles = start_angle + diffusion_times * (end_angle - start_angle)
            return ops.sin(diffusion_angles), ops.cos(diffusion_angles)

        def denoise(self, noisy_images, noise_rates, signal_rates, training):
            network = self.network if training else self.ema_network
            pred_noises = network([noisy_images, noise_rates**2], training=training)
            return pred_noises, (noisy_images - noise_rates * pred_noises) / signal_rates

        def train_step(self, images):
            images = self.normalizer(images, training=True)
            batch_size = ops.shape(images)[0]
            noises = keras.random.normal(shape=(batch_size, 8, 8, 3), seed=self.seeds)
            diffusion_times = keras.random.uniform((batch_size, 1, 1, 1), minval=0.0, maxval=1.0, seed=self.seeds)
            noise_rates, signal_rates = self.diffusion_schedule(diffusion_times)
            noisy_images = signal_rates * images + noise_rates * noises
            with tf.GradientTape() as tape:
                pred_noises, pred_images = self.denoise(noisy_images, noise_rates, signal_rates, training=True)
                noise_loss = self.loss(noises, pred_noises)
                image_loss = self.loss(images, pred_images)
            gradients = tape.gradient(noise_loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
            self.noise_loss_tracker.update_state(noise_loss)
            self.image_loss_tracker.update_state(image_loss)
            for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
                ema_weight.assign(0.9 * ema_weight + (1 - 0.9) * weight)
            return {m.name: m.result() for m in self.metrics}

    model = DiffusionModel()
    model.normalizer.adapt(images(8, 3))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=1e-3, weight_decay=1e-4), loss=keras.losses.mean_absolute_error
    )
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(images(8, 3)).batch(BATCH))


def ddpm():
    """Denoising diffusion probabilistic models: random steps of the batch, gathers of constants, a frozen average."""

    class GaussianDiffusion:
        def __init__(self, timesteps=20):
            betas = np.linspace(1e-4, 0.02, timesteps)
            alphas_cumprod = np.cumprod(1.0 - betas)
            self.sqrt_alphas_cumprod = tf.constant(np.sqrt(alphas_cumprod))
            self.sqrt_one_minus_alphas_cumprod = tf.constant(np.sqrt(1.0 - alphas_cumprod))

        def _extract(self, a, t, x_shape):
            batch_size = x_shape[0]
            return tf.reshape(tf.gather(a, t), [batch_size, 1, 1, 1])

        def q_sample(self, x_start, t, noise):
            x_start_shape = tf.shape(x_start)
            return (
                self._extract(self.sqrt_alphas_cumprod, t, x_start_shape) * x_start
                + self._extract(self.sqrt_one_minus_alphas_cumprod, t, x_start_shape) * noise
            )

    class TimeEmbedding(layers.Layer):
        def __init__(self, dim, **kwargs):
            super().__init__(**kwargs)
            self.half_dim = dim // 2
            self.emb = ops.exp(ops.arange(self.half_dim, dtype="float64") * -np.log(10000) / (self.half_dim - 1))

        def call(self, inputs):
            inputs = ops.cast(inputs, dtype="float64")
            emb = inputs[:, None] * self.emb[None, :]
            return ops.concatenate([ops.sin(emb), ops.cos(emb)], axis=-1)

    def build_model():
        image_input, time_input = keras.Input((8, 8, 1)), keras.Input((), dtype="int64")
        temb = layers.Dense(4, activation="swish")(TimeEmbedding(4)(time_input))
        x = layers.Conv2D(4, 3, padding="same")(image_input) + layers.Reshape((1, 1, 4))(temb)
        x = layers.Conv2D(4, 3, padding="same")(layers.GroupNormalization(2)(x))
        return keras.Model([image_input, time_input], layers.Conv2D(1, 3, padding="same")(x))

    class DiffusionModel(keras.Model):
        def __init__(self, network, ema_network, timesteps, gdf_util, ema=0.9):
            super().__init__()
            self.network, self.ema_network = network, ema_network
            self.timesteps = timesteps
            self.gdf_util = gdf_util
            self.ema = ema
            self.seeds = keras.random.SeedGenerator(4)

        def train_step(self, images):
            batch_size = tf.shape(images)[0]
            t = keras.random.randint((batch_size,), 0, self.timesteps, dtype="int64", seed=self.seeds)
            with tf.GradientTape() as tape:
                noise = keras.random.normal(tf.shape(images), dtype=images.dtype, seed=self.seeds)
                images_t = self.gdf_util.q_sample(images, t, noise)
                pred_noise = self.network([images_t, t], training=True)
                loss = self.loss(noise, pred_noise)
            gradients = tape.gradient(loss, self.network.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.network.trainable_weights, strict=True))
            for weight, ema_weight in zip(self.network.weights, self.ema_network.weights, strict=True):
                ema_weight.assign(self.ema * ema_weight + (1 - self.ema) * weight)
            return {"loss": loss}

    network, ema_network = build_model(), build_model()
    ema_network.set_weights(network.get_weights())
    model = DiffusionModel(network, ema_network, 20, GaussianDiffusion())
    model.compile(loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.Adam(learning_rate=2e-3))
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(images(8)).batch(BATCH))


def gaugan():
    """GauGAN: a KL loss and feature matching as loss classes, hinge losses, a layer that draws, SPADE layers."""

    def kl_divergence_loss(mean, variance):
        return -0.5 * ops.sum(1 + variance - ops.square(mean) - ops.exp(variance))

    class FeatureMatchingLoss(keras.losses.Loss):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.mae = keras.losses.MeanAbsoluteError()

        def call(self, y_true, y_pred):
            loss = 0
            for i in range(len(y_true) - 1):
                loss += self.mae(y_true[i], y_pred[i])
            return loss

    class GaussianSampler(layers.Layer):
        def __init__(self, latent_dim, **kwargs):
            super().__init__(**kwargs)
            self.latent_dim = latent_dim
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, inputs):
            means, variance = inputs
            epsilon = keras.random.normal(
                shape=(ops.shape(means)[0], self.latent_dim), mean=0.0, stddev=1.0, seed=self.seed_generator
            )
            return means + ops.exp(0.5 * variance) * epsilon

    class SPADE(layers.Layer):
        def __init__(self, filters, epsilon=1e-5, **kwargs):
            super().__init__(**kwargs)
            self.epsilon = epsilon
            self.conv_gamma, self.conv_beta = (layers.Conv2D(filters, 3, padding="same") for _ in range(2))

        def call(self, input_tensor, raw_mask):
            mask = ops.image.resize(raw_mask, input_tensor.shape[1:3], interpolation="nearest")
            mean, var = ops.moments(input_tensor, axes=(0, 1, 2), keepdims=True)
            normalized = (input_tensor - mean) / ops.sqrt(var + self.epsilon)
            return self.conv_gamma(mask) * normalized + self.conv_beta(mask)

    latent, mask = keras.Input((4,)), keras.Input((8, 8, 2))
    x = layers.Reshape((4, 4, 3))(layers.Dense(48)(latent))
    x = layers.LeakyReLU(0.2)(SPADE(3)(x, mask))
    generator = keras.Model(
        [latent, mask], layers.Conv2D(3, 3, padding="same", activation="tanh")(layers.UpSampling2D()(x))
    )
    shape, image = keras.Input((8, 8, 2)), keras.Input((8, 8, 3))
    x1 = layers.LeakyReLU(0.2)(layers.Conv2D(4, 3, 2, padding="same")(layers.Concatenate()([shape, image])))
    discriminator = keras.Model([shape, image], [x1, layers.Conv2D(1, 3)(x1)])
    encoded = layers.Flatten()(layers.Conv2D(4, 3, 2)(image))
    encoder = keras.Model(image, [layers.Dense(4)(encoded), layers.Dense(4)(encoded)])

    class GauGAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator, self.encoder = generator, discriminator, encoder
            self.sampler = GaussianSampler(4)
            names = ("disc_loss", "gen_loss", "feat_loss", "kl_loss")
            self.trackers = [keras.metrics.Mean(name=name) for name in names]

        @property
        def metrics(self):
            return self.trackers

        def compile(self, **kwargs):
            super().compile(**kwargs)
            self.generator_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.0, beta_2=0.999)
            self.discriminator_optimizer = keras.optimizers.Adam(4e-3, beta_1=0.0, beta_2=0.999)
            self.feature_matching_loss = FeatureMatchingLoss()
            self.hinge = keras.losses.Hinge()

        def train_discriminator(self, latent_vector, segmentation_map, real_image, labels):
            fake_images = self.generator([latent_vector, labels])
            with tf.GradientTape() as gradient_tape:
                pred_fake = self.discriminator([segmentation_map, fake_images])[-1]
                pred_real = self.discriminator([segmentation_map, real_image])[-1]
                total_loss = 0.5 * (self.hinge(ops.ones_like(pred_real), pred_real) + self.hinge(-1.0, pred_fake))
            self.discriminator.trainable = True
            gradients = gradient_tape.gradient(total_loss, self.discriminator.trainable_variables)
            self.discriminator_optimizer.apply_gradients(
                zip(gradients, self.discriminator.trainable_variables, strict=True)
            )
            return total_loss

        def train_step(self, data):
            segmentation_map, image, labels = data
            mean, variance = self.encoder(image)
            latent_vector = self.sampler([mean, variance])
            discriminator_loss = self.train_discriminator(latent_vector, segmentation_map, image, labels)
            with tf.GradientTape() as tape:
                mean, variance = self.encoder(image)
                fake_image = self.generator([self.sampler([mean, variance]), labels])
                real_features = self.discriminator([segmentation_map, image])
                fake_features = self.discriminator([segmentation_map, fake_image])
                g_loss = -ops.mean(fake_features[-1])
                kl_loss = 0.1 * kl_divergence_loss(mean, variance)
                feature_loss = 10 * self.feature_matching_loss(real_features, fake_features)
                total_loss = g_loss + kl_loss + feature_loss
            variables = self.generator.trainable_variables + self.encoder.trainable_variables
            gradients = tape.gradient(total_loss, variables)
            self.generator_optimizer.apply_gradients(zip(gradients, variables, strict=True))
            for tracker, loss in zip(self.trackers, (discriminator_loss, g_loss, feature_loss, kl_loss), strict=True):
                tracker.update_state(loss)
            return {m.name: m.result() for m in self.metrics}

    model = GauGAN()
    model.compile()
    masks = np.eye(2)[(images(8)[..., 0] > 0.5).astype(int)]
    data = tf.data.Dataset.from_tensor_slices((masks, images(8, 3), masks))
    return Training(model=model, x=data.batch(BATCH))


def real_nvp():
    """Density estimation by Real NVP: coupling by masks, log-determinants, a likelihood, regularized weights."""

    def coupling(reg=0.01):
        inputs = layers.Input(shape=(2,))
        made = []
        for activation in ("tanh", "linear"):
            x = layers.Dense(6, activation="relu", kernel_regularizer=keras.regularizers.l2(reg))(inputs)
            made.append(layers.Dense(2, activation=activation, kernel_regularizer=keras.regularizers.l2(reg))(x))
        return keras.Model(inputs=inputs, outputs=made)

    class RealNVP(keras.Model):
        def __init__(self, num_coupling_layers):
            super().__init__()
            self.num_coupling_layers = num_coupling_layers
            self.masks = np.array([[0, 1], [1, 0]] * (num_coupling_layers // 2), dtype="float64")
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.layers_list = [coupling() for i in range(num_coupling_layers)]

        @property
        def metrics(self):
            return [self.loss_tracker]

        def call(self, x, training=True):
            log_det_inv = 0
            direction = -1 if training else 1
            for i in range(self.num_coupling_layers)[::direction]:
                x_masked = x * self.masks[i]
                reversed_mask = 1 - self.masks[i]
                s, t = self.layers_list[i](x_masked)
                s *= reversed_mask
                t *= reversed_mask
                gate = (direction - 1) / 2
                x = reversed_mask * (x * ops.exp(direction * s) + direction * t * ops.exp(gate * s)) + x_masked
                log_det_inv += gate * ops.sum(s, axis=1)
            return x, log_det_inv

        def log_loss(self, x):
            y, logdet = self(x)
            log_likelihood = -0.5 * ops.sum(ops.square(y), axis=1) - np.log(2 * np.pi) + logdet
            return -ops.mean(log_likelihood)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.log_loss(data)
            g = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(g, self.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

        def test_step(self, data):
            self.loss_tracker.update_state(self.log_loss(data))
            return {"loss": self.loss_tracker.result()}

    model = RealNVP(num_coupling_layers=4)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001))
    return Training(model=model, x=numbers(2), fit={"validation_split": 0.2})


def nerf():
    """NeRF: rays as samples of a batch, rendering by cumulative products, a PSNR as a metric."""

    num_samples, h, w = 4, 3, 3

    def render_rgb_depth(model, rays_flat, t_vals, rand=True):
        predictions = model(rays_flat)
        predictions = tf.reshape(predictions, shape=(-1, h, w, num_samples, 4))
        rgb = tf.sigmoid(predictions[..., :-1])
        sigma_a = tf.nn.relu(predictions[..., -1])
        delta = t_vals[..., 1:] - t_vals[..., :-1]
        delta = (
            tf.concat(
                [delta, tf.broadcast_to(tf.constant([1e10], t_vals.dtype), shape=(tf.shape(t_vals)[0], 1))], axis=-1
            )
            if rand
            else delta
        )
        alpha = 1.0 - tf.exp(-sigma_a * delta[:, None, None, :])
        exp_term = 1.0 - alpha
        transmittance = tf.math.cumprod(exp_term + 1e-10, axis=-1, exclusive=True)
        weights = alpha * transmittance
        return tf.reduce_sum(weights[..., None] * rgb, axis=-2), tf.reduce_sum(weights * t_vals[:, None, None], axis=-1)

    class NeRF(keras.Model):
        def __init__(self, nerf_model):
            super().__init__()
            self.nerf_model = nerf_model

        def compile(self, optimizer, loss_fn):
            super().compile()
            self.optimizer = optimizer
            self.loss_fn = loss_fn
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.psnr_metric = keras.metrics.Mean(name="psnr")

        def train_step(self, inputs):
            images, (rays_flat, t_vals) = inputs
            with tf.GradientTape() as tape:
                rgb, _ = render_rgb_depth(self.nerf_model, rays_flat, t_vals)
                loss = self.loss_fn(images, rgb)
            trainable_variables = self.nerf_model.trainable_variables
            gradients = tape.gradient(loss, trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, trainable_variables, strict=True))
            psnr = tf.image.psnr(images, rgb, max_val=1.0)
            self.loss_tracker.update_state(loss)
            self.psnr_metric.update_state(psnr)
            return {"loss": self.loss_tracker.result(), "psnr": self.psnr_metric.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.psnr_metric]

    inputs = keras.Input(shape=(h * w * num_samples, 6))
    x = layers.Dense(units=8, activation="relu")(inputs)
    x = layers.concatenate([layers.Dense(units=8, activation="relu")(x), inputs], axis=-1)
    model = NeRF(keras.Model(inputs=inputs, outputs=layers.Dense(units=4)(x)))
    model.compile(optimizer=keras.optimizers.Adam(), loss_fn=keras.losses.MeanSquaredError())
    t_vals = np.sort(2 + 4 * np.random.default_rng(3).random((len(images()), num_samples)), axis=1)
    data = (np.random.default_rng(2).random((len(images()), h, w, 3)), (numbers(h * w * num_samples, 6), t_vals))
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(data).batch(BATCH))


def melgan():
    """MelGAN: lists of feature maps, losses with loops over them, weight-normalized convolutions, a spectrogram."""

    class MelSpec(layers.Layer):
        def __init__(self, frame_length=8, frame_step=4, bins=3, **kwargs):
            super().__init__(**kwargs)
            self.frame_length, self.frame_step = frame_length, frame_step
            self.mel_filterbank = tf.constant(np.random.default_rng(6).random((frame_length // 2 + 1, bins)))

        def call(self, audio, training=True):
            if training:
                audio = tf.squeeze(audio, -1)
                stft = tf.signal.stft(audio, self.frame_length, self.frame_step, self.frame_length, pad_end=True)
                mel = tf.matmul(tf.square(tf.abs(stft)), self.mel_filterbank)
                return tf.math.log(tf.maximum(mel, 1e-3))
            return audio

    class WeightNormalized(layers.Layer):
        def __init__(self, filters, **options):
            super().__init__()
            self.conv = layers.Conv1D(filters, 3, padding="same", **options)

        def build(self, shape):
            self.conv.build(shape)
            self.g = self.add_weight(shape=(self.conv.filters,), initializer="ones", name="g")

        def call(self, x):
            kernel = self.g * tf.math.l2_normalize(self.conv.kernel.value, axis=[0, 1])
            return tf.nn.leaky_relu(tf.nn.conv1d(x, kernel, self.conv.strides[0], "SAME") + self.conv.bias.value)

    def generator_loss(real_pred, fake_pred):
        gen_loss = []
        for i in range(len(fake_pred)):
            gen_loss.append(mse(tf.ones_like(fake_pred[i][-1]), fake_pred[i][-1]))
        return tf.reduce_mean(gen_loss)

    def feature_matching_loss(real_pred, fake_pred):
        fm_loss = []
        for i in range(len(fake_pred)):
            for j in range(len(fake_pred[i]) - 1):
                fm_loss.append(mae(real_pred[i][j], fake_pred[i][j]))
        return tf.reduce_mean(fm_loss)

    def discriminator_loss(real_pred, fake_pred):
        real_loss, fake_loss = [], []
        for i in range(len(real_pred)):
            real_loss.append(mse(tf.ones_like(real_pred[i][-1]), real_pred[i][-1]))
            fake_loss.append(mse(tf.zeros_like(fake_pred[i][-1]), fake_pred[i][-1]))
        return tf.reduce_mean(real_loss) + tf.reduce_mean(fake_loss)

    mse, mae = keras.losses.MeanSquaredError(), keras.losses.MeanAbsoluteError()

    class MelGAN(keras.Model):
        def __init__(self, generator, discriminator, generator_loss, discriminator_loss, feature_matching_loss):
            super().__init__()
            self.generator, self.discriminator = generator, discriminator
            self.generator_loss, self.discriminator_loss = generator_loss, discriminator_loss
            self.feature_matching_loss = feature_matching_loss
            self.mel_spec = MelSpec()

        def compile(self, gen_optimizer, disc_optimizer):
            super().compile()
            self.gen_optimizer, self.disc_optimizer = gen_optimizer, disc_optimizer
            self.gen_loss_tracker = keras.metrics.Mean(name="gen_loss")
            self.disc_loss_tracker = keras.metrics.Mean(name="disc_loss")

        def train_step(self, batch):
            x_batch_train, y_batch_train = batch
            x_batch_train = self.mel_spec(x_batch_train)
            with tf.GradientTape() as gen_tape, tf.GradientTape() as disc_tape:
                gen_audio_wav = self.generator(x_batch_train, training=True)
                fake_pred = self.discriminator(y_batch_train)
                real_pred = self.discriminator(gen_audio_wav)
                gen_loss = self.generator_loss(real_pred, fake_pred)
                fm_loss = self.feature_matching_loss(real_pred, fake_pred)
                gen_fm_loss = gen_loss + 10 * fm_loss
                disc_loss = self.discriminator_loss(real_pred, fake_pred)
            grads_gen = gen_tape.gradient(gen_fm_loss, self.generator.trainable_weights)
            grads_disc = disc_tape.gradient(disc_loss, self.discriminator.trainable_weights)
            self.gen_optimizer.apply_gradients(zip(grads_gen, self.generator.trainable_weights, strict=True))
            self.disc_optimizer.apply_gradients(zip(grads_disc, self.discriminator.trainable_weights, strict=True))
            self.gen_loss_tracker.update_state(gen_fm_loss)
            self.disc_loss_tracker.update_state(disc_loss)
            return {"gen_loss": self.gen_loss_tracker.result(), "disc_loss": self.disc_loss_tracker.result()}

    mel = keras.Input((4, 3))
    generator = keras.Model(mel, layers.Conv1DTranspose(1, 4, strides=4, padding="same")(WeightNormalized(4)(mel)))
    wave = keras.Input((16, 1))
    maps = []
    for each in (wave, layers.AveragePooling1D(2)(wave)):
        first = WeightNormalized(3, strides=2)(each)
        maps.append([first, WeightNormalized(1)(first)])
    discriminator = keras.Model(wave, maps)
    model = MelGAN(generator, discriminator, generator_loss, discriminator_loss, feature_matching_loss)
    model.compile(
        keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9, clipnorm=1),
        keras.optimizers.Adam(1e-3, beta_1=0.5, beta_2=0.9),
    )
    sound = numbers(16, 1)
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((sound, sound)).batch(BATCH))


def neural_style():
    """Neural style and deep dream: a loop that trains images by gradients of Gram matrices, normalized by hand."""

    def run(steps):
        inputs = keras.Input((8, 8, 3))
        low = layers.Conv2D(4, 3, activation="relu")(inputs)
        extractor = keras.Model(inputs, [low, layers.Conv2D(4, 3, activation="relu")(low)])

        def gram_matrix(x):
            features = tf.reshape(tf.transpose(x, (0, 3, 1, 2)), (tf.shape(x)[0], 4, -1))
            return tf.matmul(features, features, transpose_b=True)

        @steps.compiled
        def step(pictures, content, style):
            with tf.GradientTape() as tape:
                tape.watch(pictures)
                found = extractor(tf.concat([content, style, pictures], axis=0))
                of_content, of_style, combined = (tf.split(found[1], 3)[each] for each in range(3))
                loss = 0.1 * tf.reduce_sum(tf.square(combined - of_content))
                loss += tf.reduce_sum(tf.square(gram_matrix(of_style) - gram_matrix(combined))) / 100.0
                a = tf.square(pictures[:, :7, :7] - pictures[:, 1:, :7])
                b = tf.square(pictures[:, :7, :7] - pictures[:, :7, 1:])
                loss += 1e-3 * tf.reduce_sum(tf.pow(a + b + 1e-9, 1.25))
            grads = tape.gradient(loss, pictures)
            grads /= tf.maximum(tf.reduce_mean(tf.abs(grads)), 1e-6)
            return loss, pictures - 0.01 * grads

        history = {"loss": []}
        pictures, content, style = images(8, 3)[:BATCH], images(8, 3)[:BATCH], images(8, 3, seed=3)[:BATCH]
        for _ in range(2 * EPOCHS):
            loss, pictures = step(*steps.mine(np.asarray(pictures), content, style))
            history["loss"].append(float(loss))
        return [np.asarray(pictures)], history

    return Loop(run)


EXAMPLES = (ddim, ddpm, gaugan, real_nvp, nerf, melgan, neural_style)
