"""Examples that generate codes, pixels or words one after the other."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, Training, images, tokens


def vq_vae():
    """VQ-VAE: a layer with a codebook, straight-through gradients, `add_loss`, and a variance of the data."""

    class VectorQuantizer(layers.Layer):
        def __init__(self, num_embeddings, embedding_dim, beta=0.25, **kwargs):
            super().__init__(**kwargs)
            self.embedding_dim = embedding_dim
            self.num_embeddings = num_embeddings
            self.beta = beta
            self.embeddings = self.add_weight(
                shape=(embedding_dim, num_embeddings), initializer="random_uniform", trainable=True, name="vqvae"
            )

        def call(self, x):
            input_shape = ops.shape(x)
            flattened = ops.reshape(x, [-1, self.embedding_dim])
            encoding_indices = self.get_code_indices(flattened)
            encodings = ops.one_hot(encoding_indices, self.num_embeddings)
            quantized = ops.matmul(encodings, ops.transpose(self.embeddings))
            quantized = ops.reshape(quantized, input_shape)
            commitment_loss = ops.mean((ops.stop_gradient(quantized) - x) ** 2)
            codebook_loss = ops.mean((quantized - ops.stop_gradient(x)) ** 2)
            self.add_loss(self.beta * commitment_loss + codebook_loss)
            return x + ops.stop_gradient(quantized - x)

        def get_code_indices(self, flattened_inputs):
            similarity = ops.matmul(flattened_inputs, self.embeddings)
            squares = ops.sum(flattened_inputs**2, axis=1, keepdims=True)
            distances = squares + ops.sum(self.embeddings**2, axis=0) - 2 * similarity
            return ops.argmin(distances, axis=1)

    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(6, 3, activation="relu", strides=2, padding="same")(inputs)
    quantized = VectorQuantizer(5, 3)(layers.Conv2D(3, 1, padding="same")(x))
    outputs = layers.Conv2DTranspose(1, 3, strides=2, padding="same")(quantized)
    net = keras.Model(inputs, outputs, name="vq_vae")

    class VQVAETrainer(keras.Model):
        def __init__(self, train_variance, vqvae, **kwargs):
            super().__init__(**kwargs)
            self.train_variance = train_variance
            self.vqvae = vqvae
            self.total_loss_tracker = keras.metrics.Mean(name="total_loss")
            self.reconstruction_loss_tracker = keras.metrics.Mean(name="reconstruction_loss")
            self.vq_loss_tracker = keras.metrics.Mean(name="vq_loss")

        @property
        def metrics(self):
            return [self.total_loss_tracker, self.reconstruction_loss_tracker, self.vq_loss_tracker]

        def train_step(self, x):
            with tf.GradientTape() as tape:
                reconstructions = self.vqvae(x)
                reconstruction_loss = ops.mean((x - reconstructions) ** 2) / self.train_variance
                total_loss = reconstruction_loss + sum(self.vqvae.losses)
            grads = tape.gradient(total_loss, self.vqvae.trainable_variables)
            self.optimizer.apply_gradients(zip(grads, self.vqvae.trainable_variables, strict=True))
            self.total_loss_tracker.update_state(total_loss)
            self.reconstruction_loss_tracker.update_state(reconstruction_loss)
            self.vq_loss_tracker.update_state(sum(self.vqvae.losses))
            return {
                "loss": self.total_loss_tracker.result(),
                "reconstruction_loss": self.reconstruction_loss_tracker.result(),
                "vqvae_loss": self.vq_loss_tracker.result(),
            }

    x_train = images(8)
    model = VQVAETrainer(np.var(x_train), net)
    model.compile(optimizer=keras.optimizers.Adam())
    return Training(model=model, x=x_train)


def pixelcnn():
    """PixelCNN: layers with masked kernels."""

    class PixelConvLayer(layers.Layer):
        def __init__(self, mask_type, **kwargs):
            super().__init__()
            self.mask_type = mask_type
            self.conv = layers.Conv2D(**kwargs)

        def build(self, input_shape):
            self.conv.build(input_shape)
            kernel_shape = ops.shape(self.conv.kernel)
            self.mask = np.zeros(shape=kernel_shape)
            self.mask[: kernel_shape[0] // 2, ...] = 1.0
            self.mask[kernel_shape[0] // 2, : kernel_shape[1] // 2, ...] = 1.0
            if self.mask_type == "B":
                self.mask[kernel_shape[0] // 2, kernel_shape[1] // 2, ...] = 1.0

        def call(self, inputs):
            self.conv.kernel.assign(self.conv.kernel * self.mask)
            return self.conv(inputs)

    class ResidualBlock(layers.Layer):
        def __init__(self, filters, **kwargs):
            super().__init__(**kwargs)
            self.conv1 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")
            self.pixel_conv = PixelConvLayer(
                mask_type="B", filters=filters // 2, kernel_size=3, activation="relu", padding="same"
            )
            self.conv2 = layers.Conv2D(filters=filters, kernel_size=1, activation="relu")

        def call(self, inputs):
            return layers.add([inputs, self.conv2(self.pixel_conv(self.conv1(inputs)))])

    inputs = keras.Input(shape=(8, 8, 1))
    x = PixelConvLayer(mask_type="A", filters=4, kernel_size=5, activation="relu", padding="same")(inputs)
    x = ResidualBlock(filters=4)(x)
    out = layers.Conv2D(filters=1, kernel_size=1, activation="sigmoid")(x)
    model = keras.Model(inputs, out)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.0005), loss="binary_crossentropy")
    x = np.where(images(8) < 0.33, 0.0, 1.0)
    return Training(model=model, x=x, y=x, fit={"validation_split": 0.1})


def miniature_gpt():
    """Text generation with a miniature GPT: layers with causal masks of the batch's shape, a loss for one output."""

    vocab_size, maxlen, embed_dim = 11, 6, 6

    def causal_attention_mask(batch_size, n_dest, n_src, dtype):
        i = ops.arange(n_dest)[:, None]
        j = ops.arange(n_src)
        m = i >= j - n_src + n_dest
        mask = ops.reshape(ops.cast(m, dtype), [1, n_dest, n_src])
        mult = ops.concatenate([ops.expand_dims(batch_size, -1), ops.convert_to_tensor([1, 1])], 0)
        return tf.tile(mask, mult)

    class TransformerBlock(layers.Layer):
        def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
            super().__init__()
            self.att = layers.MultiHeadAttention(num_heads, embed_dim)
            self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
            self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
            self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
            self.dropout1 = layers.Dropout(rate)
            self.dropout2 = layers.Dropout(rate)

        def call(self, inputs):
            input_shape = ops.shape(inputs)
            causal_mask = causal_attention_mask(input_shape[0], input_shape[1], input_shape[1], "bool")
            attention_output = self.dropout1(self.att(inputs, inputs, attention_mask=causal_mask))
            out1 = self.layernorm1(inputs + attention_output)
            return self.layernorm2(out1 + self.dropout2(self.ffn(out1)))

    class TokenAndPositionEmbedding(layers.Layer):
        def __init__(self, maxlen, vocab_size, embed_dim):
            super().__init__()
            self.token_emb = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
            self.pos_emb = layers.Embedding(input_dim=maxlen, output_dim=embed_dim)

        def call(self, x):
            positions = self.pos_emb(ops.arange(0, ops.shape(x)[-1], 1))
            return self.token_emb(x) + positions

    inputs = layers.Input(shape=(maxlen,), dtype="int32")
    x = TransformerBlock(embed_dim, 2, 8)(TokenAndPositionEmbedding(maxlen, vocab_size, embed_dim)(inputs))
    model = keras.Model(inputs=inputs, outputs=[layers.Dense(vocab_size)(x), x])
    model.compile("adam", loss=[keras.losses.SparseCategoricalCrossentropy(from_logits=True), None])
    text = tokens(maxlen + 1, vocab_size).astype("int32")
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((text[:, :-1], text[:, 1:])).batch(BATCH))


EXAMPLES = (
    vq_vae,
    pixelcnn,
    miniature_gpt,
)
