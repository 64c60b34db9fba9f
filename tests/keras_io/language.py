"""Examples with text, speech and other sequences."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, Training, classes, images, numbers, tokens


class PositionalEmbedding(layers.Layer):
    def __init__(self, sequence_length, vocab_size, embed_dim, **kwargs):
        super().__init__(**kwargs)
        self.token_embeddings = layers.Embedding(input_dim=vocab_size, output_dim=embed_dim)
        self.position_embeddings = layers.Embedding(input_dim=sequence_length, output_dim=embed_dim)

    def call(self, inputs):
        length = ops.shape(inputs)[-1]
        positions = ops.arange(0, length, 1)
        return self.token_embeddings(inputs) + self.position_embeddings(positions)

    def compute_mask(self, inputs, mask=None):
        return ops.not_equal(inputs, 0)


class TransformerBlock(layers.Layer):
    def __init__(self, embed_dim, num_heads, ff_dim, rate=0.1):
        super().__init__()
        self.att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
        self.ffn = keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
        self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
        self.layernorm2 = layers.LayerNormalization(epsilon=1e-6)
        self.dropout1 = layers.Dropout(rate)
        self.dropout2 = layers.Dropout(rate)

    def call(self, inputs, training=False):
        attn_output = self.dropout1(self.att(inputs, inputs), training=training)
        out1 = self.layernorm1(inputs + attn_output)
        return self.layernorm2(out1 + self.dropout2(self.ffn(out1), training=training))


def text_classification_transformer():
    """Text classification with a transformer: layers of attention and embeddings, in plain `fit`."""
    inputs = layers.Input(shape=(6,))
    x = TransformerBlock(5, 2, 6)(PositionalEmbedding(6, 11, 5)(inputs))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs=inputs, outputs=layers.Dense(2, activation="softmax")(x))
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    x, y = tokens(), classes(2)
    return Training(model=model, x=x, y=y, fit={"validation_data": (x[:9], y[:9]), "validation_batch_size": 8})


def translation_transformer():
    """Translation with a sequence-to-sequence transformer: a causal mask of the batch, masks handed on by layers."""

    class TransformerEncoder(layers.Layer):
        def __init__(self, embed_dim, dense_dim, num_heads, **kwargs):
            super().__init__(**kwargs)
            self.attention = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
            self.dense_proj = keras.Sequential([layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)])
            self.layernorm_1 = layers.LayerNormalization()
            self.layernorm_2 = layers.LayerNormalization()
            self.supports_masking = True

        def call(self, inputs, mask=None):
            padding_mask = ops.cast(mask[:, None, :], dtype="int32") if mask is not None else None
            attention_output = self.attention(query=inputs, value=inputs, key=inputs, attention_mask=padding_mask)
            proj_input = self.layernorm_1(inputs + attention_output)
            return self.layernorm_2(proj_input + self.dense_proj(proj_input))

    class TransformerDecoder(layers.Layer):
        def __init__(self, embed_dim, latent_dim, num_heads, **kwargs):
            super().__init__(**kwargs)
            self.attention_1 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
            self.attention_2 = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
            self.dense_proj = keras.Sequential([layers.Dense(latent_dim, activation="relu"), layers.Dense(embed_dim)])
            self.layernorm_1 = layers.LayerNormalization()
            self.layernorm_2 = layers.LayerNormalization()
            self.layernorm_3 = layers.LayerNormalization()
            self.supports_masking = True

        def call(self, inputs, mask=None):
            inputs, encoder_outputs = inputs
            causal_mask = self.get_causal_attention_mask(inputs)
            inputs_padding_mask, encoder_outputs_padding_mask = (None, None) if mask is None else mask
            attention_output_1 = self.attention_1(
                query=inputs, value=inputs, key=inputs, attention_mask=causal_mask, query_mask=inputs_padding_mask
            )
            out_1 = self.layernorm_1(inputs + attention_output_1)
            attention_output_2 = self.attention_2(
                query=out_1,
                value=encoder_outputs,
                key=encoder_outputs,
                query_mask=inputs_padding_mask,
                key_mask=encoder_outputs_padding_mask,
            )
            out_2 = self.layernorm_2(out_1 + attention_output_2)
            return self.layernorm_3(out_2 + self.dense_proj(out_2))

        def get_causal_attention_mask(self, inputs):
            input_shape = tf.shape(inputs)
            batch_size, sequence_length = input_shape[0], input_shape[1]
            i = tf.range(sequence_length)[:, None]
            j = tf.range(sequence_length)
            mask = tf.cast(i >= j, dtype="int32")
            mask = tf.reshape(mask, (1, sequence_length, sequence_length))
            mult = tf.concat([tf.expand_dims(batch_size, -1), tf.constant([1, 1], dtype=tf.int32)], axis=0)
            return tf.tile(mask, mult)

    encoder_inputs = keras.Input(shape=(None,), dtype="int64", name="encoder_inputs")
    encoder_outputs = TransformerEncoder(5, 6, 2)(PositionalEmbedding(6, 11, 5)(encoder_inputs))
    decoder_inputs = keras.Input(shape=(None,), dtype="int64", name="decoder_inputs")
    x = PositionalEmbedding(6, 11, 5)(decoder_inputs)
    x = layers.Dropout(0.5)(TransformerDecoder(5, 6, 2)([x, encoder_outputs]))
    model = keras.Model([encoder_inputs, decoder_inputs], layers.Dense(11, activation="softmax")(x))
    model.compile(
        "rmsprop",
        loss=keras.losses.SparseCategoricalCrossentropy(ignore_class=0),
        metrics=["accuracy"],
    )
    target = tokens(7, seed=4)
    inputs = {"encoder_inputs": tokens(), "decoder_inputs": target[:, :-1]}
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((inputs, target[:, 1:])).batch(BATCH))


def masked_loss_and_accuracy():
    """Translation with attention (TensorFlow's tutorial): a masked loss and a masked accuracy as functions."""

    def masked_loss(y_true, y_pred):
        loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
        loss = loss_fn(y_true, y_pred)
        mask = tf.cast(y_true != 0, loss.dtype)
        loss *= mask
        return tf.reduce_sum(loss) / tf.reduce_sum(mask)

    def masked_acc(y_true, y_pred):
        y_pred = tf.cast(tf.argmax(y_pred, axis=-1), y_true.dtype)
        match = tf.cast(y_true == y_pred, tf.float64)
        mask = tf.cast(y_true != 0, tf.float64)
        return tf.reduce_sum(match * mask) / tf.reduce_sum(mask)

    class CrossAttention(layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__()
            self.mha = layers.MultiHeadAttention(key_dim=units, num_heads=1, **kwargs)
            self.layernorm = layers.LayerNormalization()
            self.add = layers.Add()

        def call(self, x, context):
            attn_output, attn_scores = self.mha(query=x, value=context, return_attention_scores=True)
            self.last_attention_weights = ops.mean(attn_scores, axis=1)
            return self.layernorm(self.add([x, attn_output]))

    class Translator(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.encoder_embedding = layers.Embedding(11, units, mask_zero=True)
            self.encoder_rnn = layers.Bidirectional(layers.GRU(units, return_sequences=True), merge_mode="sum")
            self.decoder_embedding = layers.Embedding(11, units, mask_zero=True)
            self.decoder_rnn = layers.GRU(units, return_sequences=True)
            self.attention = CrossAttention(units)
            self.output_layer = layers.Dense(11)

        def call(self, inputs):
            context, x = inputs
            context = self.encoder_rnn(self.encoder_embedding(context))
            x = self.decoder_rnn(self.decoder_embedding(x))
            return self.output_layer(self.attention(x, context))

    model = Translator(5)
    model.compile(optimizer="adam", loss=masked_loss, metrics=[masked_acc, masked_loss])
    target = tokens(7, seed=4)
    data = tf.data.Dataset.from_tensor_slices(((tokens(), target[:, :-1]), target[:, 1:]))
    return Training(model=model, x=data.batch(BATCH), fit={"validation_data": data.take(8).batch(8)})


def named_entity_transformer():
    """Named entity recognition: a loss class that leaves out padding."""

    class CustomNonPaddingTokenLoss(keras.losses.Loss):
        def __init__(self, name="custom_ner_loss"):
            super().__init__(name=name)

        def call(self, y_true, y_pred):
            loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=False, reduction=None)
            loss = loss_fn(y_true, y_pred)
            mask = ops.cast((y_true > 0), dtype="float64")
            loss = loss * mask
            return ops.sum(loss) / ops.sum(mask)

    class NERModel(keras.Model):
        def __init__(self, num_tags, vocab_size, maxlen=6, embed_dim=5, num_heads=2, ff_dim=6):
            super().__init__()
            self.embedding_layer = PositionalEmbedding(maxlen, vocab_size, embed_dim)
            self.transformer_block = TransformerBlock(embed_dim, num_heads, ff_dim)
            self.dropout1 = layers.Dropout(0.1)
            self.ff = layers.Dense(ff_dim, activation="relu")
            self.ff_final = layers.Dense(num_tags, activation="softmax")

        def call(self, inputs, training=False):
            x = self.transformer_block(self.embedding_layer(inputs), training=training)
            x = self.dropout1(x, training=training)
            return self.ff_final(self.ff(x))

    model = NERModel(4, 11)
    model.compile(optimizer="adam", loss=CustomNonPaddingTokenLoss())
    words = tokens()
    tags = np.where(words > 0, classes(3, 6) + 1, 0)
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((words, tags)).batch(BATCH))


def masked_language_model():
    """Masked language modeling with BERT: a `train_step` with the weights of masked tokens."""

    loss_fn = keras.losses.SparseCategoricalCrossentropy(reduction=None)
    loss_tracker = keras.metrics.Mean(name="loss")

    class MaskedLanguageModel(keras.Model):
        def train_step(self, inputs):
            if len(inputs) == 3:
                features, labels, sample_weight = inputs
            else:
                features, labels = inputs
                sample_weight = None
            with tf.GradientTape() as tape:
                predictions = self(features, training=True)
                loss = loss_fn(labels, predictions, sample_weight=sample_weight)
            trainable_vars = self.trainable_variables
            gradients = tape.gradient(loss, trainable_vars)
            self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
            loss_tracker.update_state(loss, sample_weight=sample_weight)
            return {"loss": loss_tracker.result()}

        @property
        def metrics(self):
            return [loss_tracker]

    inputs = layers.Input((6,), dtype="int64")
    word_embeddings = layers.Embedding(12, 5, name="word_embedding")(inputs)
    position_embeddings = layers.Embedding(6, 5, name="position_embedding")(ops.arange(0, 6, 1))
    embeddings = word_embeddings + position_embeddings
    attention_output = layers.MultiHeadAttention(num_heads=2, key_dim=3)(embeddings, embeddings, embeddings)
    attention_output = layers.Dropout(0.1)(attention_output)
    attention_output = layers.LayerNormalization(epsilon=1e-6)(embeddings + attention_output)
    mlm_model = MaskedLanguageModel(inputs, layers.Dense(12, activation="softmax")(attention_output))
    mlm_model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001))
    labels = tokens()
    masked = (np.random.default_rng(8).random(labels.shape) < 0.3) & (labels > 0)
    features = np.where(masked, 11, labels)
    data = tf.data.Dataset.from_tensor_slices((features, labels, masked.astype("float64")))
    return Training(model=mlm_model, x=data.batch(BATCH))


def switch_transformer():
    """Switch transformer: a router that adds its balance of the batch's tokens, capacity by cumulative sums."""

    num_experts = 3

    def load_balanced_loss(router_probs, expert_mask):
        num_experts = ops.shape(expert_mask)[-1]
        density = ops.mean(expert_mask, axis=0)
        density_proxy = ops.mean(router_probs, axis=0)
        return ops.mean(density_proxy * density) * ops.cast((num_experts**2), "float64")

    class Router(layers.Layer):
        def __init__(self, num_experts, expert_capacity):
            super().__init__()
            self.num_experts = num_experts
            self.route = layers.Dense(units=num_experts)
            self.expert_capacity = expert_capacity
            self.seed_generator = keras.random.SeedGenerator(5)

        def call(self, inputs, training=False):
            router_logits = self.route(inputs)
            if training:
                router_logits += keras.random.uniform(
                    shape=ops.shape(router_logits), minval=0.9, maxval=1.1, seed=self.seed_generator
                )
            router_probs = keras.activations.softmax(router_logits, axis=-1)
            expert_gate, expert_index = ops.top_k(router_probs, k=1)
            expert_mask = ops.one_hot(expert_index, self.num_experts)
            aux_loss = load_balanced_loss(router_probs, expert_mask)
            self.add_loss(aux_loss)
            position_in_expert = ops.cast(ops.cumsum(expert_mask, axis=0) * expert_mask, "int32")
            expert_mask *= ops.cast(ops.less(ops.cast(position_in_expert, "int32"), self.expert_capacity), "float64")
            expert_mask_flat = ops.sum(expert_mask, axis=-1)
            expert_gate *= expert_mask_flat
            combined_tensor = ops.expand_dims(
                expert_gate * expert_mask_flat * ops.squeeze(ops.one_hot(expert_index, self.num_experts), 1),
                -1,
            ) * ops.squeeze(ops.one_hot(position_in_expert, self.expert_capacity), 1)
            dispatch_tensor = ops.cast(combined_tensor, "float64")
            return dispatch_tensor, combined_tensor

    class Switch(layers.Layer):
        def __init__(self, num_experts, embed_dim, ff_dim, num_tokens_per_batch):
            super().__init__()
            self.num_experts = num_experts
            self.embed_dim = embed_dim
            self.experts = [
                keras.Sequential([layers.Dense(ff_dim, activation="relu"), layers.Dense(embed_dim)])
                for _ in range(num_experts)
            ]
            self.expert_capacity = num_tokens_per_batch // self.num_experts
            self.router = Router(self.num_experts, self.expert_capacity)

        def call(self, inputs):
            num_tokens_per_example = ops.shape(inputs)[1]
            inputs = ops.reshape(inputs, [-1, self.embed_dim])
            dispatch_tensor, combine_tensor = self.router(inputs)
            expert_inputs = ops.einsum("ab,acd->cdb", inputs, dispatch_tensor)
            expert_inputs = ops.reshape(expert_inputs, [self.num_experts, self.expert_capacity, self.embed_dim])
            expert_input_list = ops.unstack(expert_inputs, axis=0)
            expert_output_list = [self.experts[idx](expert_input) for idx, expert_input in enumerate(expert_input_list)]
            expert_outputs = ops.stack(expert_output_list, axis=1)
            expert_outputs_combined = ops.einsum("abc,xba->xc", expert_outputs, combine_tensor)
            return ops.reshape(expert_outputs_combined, [-1, num_tokens_per_example, self.embed_dim])

    inputs = layers.Input(shape=(4,))
    embedded = PositionalEmbedding(4, 11, 5)(inputs)
    x = layers.LayerNormalization()(embedded + layers.MultiHeadAttention(2, 5)(embedded, embedded))
    x = layers.LayerNormalization()(x + Switch(num_experts, 5, 6, num_tokens_per_batch=4 * BATCH)(x))
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling1D()(x))
    model = keras.Model(inputs=inputs, outputs=layers.Dense(2, activation="softmax")(x))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Training(model=model, x=tokens(4), y=classes(2))


def fnet():
    """FNet: layers of Fourier transforms along the sequence."""

    class FNetEncoder(layers.Layer):
        def __init__(self, embed_dim, dense_dim, **kwargs):
            super().__init__(**kwargs)
            self.dense_proj = keras.Sequential([layers.Dense(dense_dim, activation="relu"), layers.Dense(embed_dim)])
            self.layernorm_1 = layers.LayerNormalization()
            self.layernorm_2 = layers.LayerNormalization()

        def call(self, inputs):
            inp_complex = tf.cast(inputs, tf.complex128)
            fft = tf.math.real(tf.signal.fft2d(inp_complex))
            proj_input = self.layernorm_1(inputs + fft)
            return self.layernorm_2(proj_input + self.dense_proj(proj_input))

    inputs = keras.Input(shape=(6,), dtype="int64")
    x = FNetEncoder(4, 6)(PositionalEmbedding(6, 11, 4)(inputs))
    model = keras.Model(inputs, layers.Dense(11, activation="softmax")(layers.Dropout(0.5)(x)))
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    return Training(model=model, x=tokens(), y=tokens(seed=5))


def captcha_ocr():
    """OCR for reading captchas: a layer that adds the CTC loss of its targets, by `tf.nn` within the layer."""

    def ctc_batch_cost(y_true, y_pred, input_length, label_length):
        label_length = ops.cast(ops.squeeze(label_length, axis=-1), dtype="int32")
        input_length = ops.cast(ops.squeeze(input_length, axis=-1), dtype="int32")
        y_pred = ops.log(ops.transpose(y_pred, axes=[1, 0, 2]) + keras.backend.epsilon())
        loss = tf.nn.ctc_loss(
            labels=ops.cast(y_true, "int32"),
            logits=ops.cast(y_pred, "float32"),
            label_length=label_length,
            logit_length=input_length,
            blank_index=-1,
        )
        return ops.expand_dims(loss, 1)

    class CTCLayer(layers.Layer):
        def __init__(self, name=None):
            super().__init__(name=name)
            self.loss_fn = ctc_batch_cost

        def call(self, y_true, y_pred):
            batch_len = ops.cast(ops.shape(y_true)[0], dtype="int64")
            input_length = ops.cast(ops.shape(y_pred)[1], dtype="int64")
            label_length = ops.cast(ops.shape(y_true)[1], dtype="int64")
            input_length = input_length * ops.ones(shape=(batch_len, 1), dtype="int64")
            label_length = label_length * ops.ones(shape=(batch_len, 1), dtype="int64")
            loss = self.loss_fn(y_true, y_pred, input_length, label_length)
            self.add_loss(loss)
            return y_pred

    input_img = layers.Input(shape=(8, 8, 1), name="image")
    labels = layers.Input(name="label", shape=(3,))
    x = layers.Conv2D(4, 3, activation="relu", padding="same")(input_img)
    x = layers.Dropout(0.2)(layers.Dense(5, activation="relu")(layers.Reshape(target_shape=(8, 32))(x)))
    x = layers.Bidirectional(layers.LSTM(4, return_sequences=True))(x)
    x = layers.Dense(6, activation="softmax", name="dense2")(x)
    model = keras.Model(inputs=[input_img, labels], outputs=CTCLayer(name="ctc_loss")(labels, x))
    model.compile(optimizer=keras.optimizers.Adam())
    data = {"image": images(8), "label": classes(5, 3).astype("float64")}
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(data).batch(BATCH))


def ctc_speech_recognition():
    """Speech recognition with CTC: a loss function with lengths of the batch's shape."""

    def ctc_loss(y_true, y_pred):
        batch_len = ops.shape(y_true)[0]
        input_length = ops.shape(y_pred)[1] * ops.ones(shape=(batch_len,), dtype="int32")
        label_length = ops.shape(y_true)[1] * ops.ones(shape=(batch_len,), dtype="int32")
        return ops.ctc_loss(ops.cast(y_true, "int32"), y_pred, label_length, input_length)

    input_spectrogram = layers.Input((None, 6), name="input")
    x = layers.Reshape((-1, 6, 1))(input_spectrogram)
    x = layers.ReLU()(layers.Conv2D(3, (3, 3), padding="same", use_bias=False)(x))
    x = layers.Reshape((-1, x.shape[-2] * x.shape[-1]))(x)
    x = layers.Bidirectional(layers.GRU(4, return_sequences=True))(x)
    model = keras.Model(input_spectrogram, layers.Dense(6)(layers.Dropout(0.5)(x)))
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=1e-4), loss=ctc_loss)
    labels = 1 + classes(4, 3)
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((numbers(9, 6), labels)).batch(BATCH))


def speech_transformer():
    """Speech recognition with a transformer: a `train_step` with a one-hot target, a mask and weights of the loss."""

    class TransformerDecoder(layers.Layer):
        def __init__(self, embed_dim, num_heads, feed_forward_dim, dropout_rate=0.1):
            super().__init__()
            self.layernorm1 = layers.LayerNormalization(epsilon=1e-6)
            self.self_att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
            self.enc_att = layers.MultiHeadAttention(num_heads=num_heads, key_dim=embed_dim)
            self.dropout = layers.Dropout(0.3)
            self.ffn = keras.Sequential([layers.Dense(feed_forward_dim, activation="relu"), layers.Dense(embed_dim)])

        def causal_attention_mask(self, batch_size, n_dest, n_src, dtype):
            i = tf.range(n_dest)[:, None]
            j = tf.range(n_src)
            m = i >= j - n_src + n_dest
            mask = tf.reshape(tf.cast(m, dtype), [1, n_dest, n_src])
            mult = tf.concat([batch_size[..., tf.newaxis], tf.constant([1, 1], dtype=tf.int32)], 0)
            return tf.tile(mask, mult)

        def call(self, enc_out, target):
            input_shape = tf.shape(target)
            causal_mask = self.causal_attention_mask(input_shape[0], input_shape[1], input_shape[1], tf.bool)
            target_att = self.self_att(target, target, attention_mask=causal_mask)
            target_norm = self.layernorm1(target + self.dropout(target_att))
            return self.ffn(self.enc_att(target_norm, enc_out) + target_norm)

    class Transformer(keras.Model):
        def __init__(self, num_classes=11, num_hid=5):
            super().__init__()
            self.loss_metric = keras.metrics.Mean(name="loss")
            self.num_classes = num_classes
            self.enc_input = keras.Sequential([layers.Conv1D(num_hid, 3, strides=2, padding="same", activation="relu")])
            self.dec_input = PositionalEmbedding(6, num_classes, num_hid)
            self.decoder = TransformerDecoder(num_hid, 2, 6)
            self.classifier = layers.Dense(num_classes)

        def call(self, inputs):
            source, target = inputs
            return self.classifier(self.decoder(self.enc_input(source), self.dec_input(target)))

        @property
        def metrics(self):
            return [self.loss_metric]

        def train_step(self, batch):
            source, target = batch["source"], batch["target"]
            dec_input, dec_target = target[:, :-1], target[:, 1:]
            with tf.GradientTape() as tape:
                preds = self([source, dec_input])
                one_hot = tf.one_hot(dec_target, depth=self.num_classes)
                mask = tf.math.logical_not(tf.math.equal(dec_target, 0))
                loss = self.compute_loss(None, one_hot, preds, sample_weight=mask)
            trainable_vars = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, trainable_vars), trainable_vars, strict=True))
            self.loss_metric.update_state(loss)
            return {"loss": self.loss_metric.result()}

        def test_step(self, batch):
            source, target = batch["source"], batch["target"]
            dec_input, dec_target = target[:, :-1], target[:, 1:]
            preds = self([source, dec_input])
            one_hot = tf.one_hot(dec_target, depth=self.num_classes)
            mask = tf.math.logical_not(tf.math.equal(dec_target, 0))
            loss = self.compute_loss(None, one_hot, preds, sample_weight=mask)
            self.loss_metric.update_state(loss)
            return {"loss": self.loss_metric.result()}

    class CustomSchedule(keras.optimizers.schedules.LearningRateSchedule):
        def __init__(self, steps_per_epoch=4):
            super().__init__()
            self.steps_per_epoch = steps_per_epoch

        def __call__(self, step):
            epoch = step // self.steps_per_epoch
            return 1e-5 + (1e-2 - 1e-5) / 2 * tf.cast(epoch + 1, tf.float64)

    model = Transformer()
    loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(optimizer=keras.optimizers.Adam(CustomSchedule()), loss=loss_fn)
    data = tf.data.Dataset.from_tensor_slices({"source": numbers(8, 4), "target": tokens(7)})
    return Training(model=model, x=data.batch(BATCH), fit={"validation_data": data.take(8).batch(8)})


def image_captioning():
    """Image captioning: several captions an image in a loop of the step, masked loss and accuracy, trackers."""

    class ImageCaptioningModel(keras.Model):
        def __init__(self, num_captions_per_image=3):
            super().__init__()
            self.cnn_model = keras.Sequential([layers.Conv2D(4, 3, 2), layers.Reshape((-1, 4)), layers.Dense(5)])
            self.encoder = layers.MultiHeadAttention(1, 5)
            self.embedding = PositionalEmbedding(6, 11, 5)
            self.decoder = layers.MultiHeadAttention(2, 5, dropout=0.1)
            self.out = layers.Dense(11, activation="softmax")
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.acc_tracker = keras.metrics.Mean(name="accuracy")
            self.num_captions_per_image = num_captions_per_image

        def calculate_loss(self, y_true, y_pred, mask):
            loss = self.loss(y_true, y_pred)
            mask = tf.cast(mask, dtype=loss.dtype)
            loss *= mask
            return tf.reduce_sum(loss) / tf.reduce_sum(mask)

        def calculate_accuracy(self, y_true, y_pred, mask):
            accuracy = tf.equal(y_true, tf.argmax(y_pred, axis=2))
            accuracy = tf.math.logical_and(mask, accuracy)
            accuracy = tf.cast(accuracy, dtype=tf.float64)
            mask = tf.cast(mask, dtype=tf.float64)
            return tf.reduce_sum(accuracy) / tf.reduce_sum(mask)

        def _compute_caption_loss_and_acc(self, img_embed, batch_seq, training=True):
            encoder_out = self.encoder(img_embed, img_embed, training=training)
            batch_seq_inp, batch_seq_true = batch_seq[:, :-1], batch_seq[:, 1:]
            mask = tf.math.not_equal(batch_seq_true, 0)
            embedded = self.embedding(batch_seq_inp)
            hidden = self.decoder(embedded, encoder_out, training=training, query_mask=mask)
            batch_seq_pred = self.out(hidden)
            loss = self.calculate_loss(batch_seq_true, batch_seq_pred, mask)
            return loss, self.calculate_accuracy(batch_seq_true, batch_seq_pred, mask)

        def train_step(self, batch_data):
            batch_img, batch_seq = batch_data
            batch_loss = 0
            batch_acc = 0
            img_embed = self.cnn_model(batch_img)
            for i in range(self.num_captions_per_image):
                with tf.GradientTape() as tape:
                    loss, acc = self._compute_caption_loss_and_acc(img_embed, batch_seq[:, i, :], training=True)
                    batch_loss += loss
                    batch_acc += acc
                train_vars = self.encoder.trainable_variables + self.decoder.trainable_variables
                grads = tape.gradient(loss, train_vars)
                self.optimizer.apply_gradients(zip(grads, train_vars, strict=True))
            batch_acc /= float(self.num_captions_per_image)
            self.loss_tracker.update_state(batch_loss)
            self.acc_tracker.update_state(batch_acc)
            return {"loss": self.loss_tracker.result(), "acc": self.acc_tracker.result()}

        @property
        def metrics(self):
            return [self.loss_tracker, self.acc_tracker]

    model = ImageCaptioningModel()
    img, captions = images(8, 3), np.stack([tokens(7, seed=seed) for seed in range(3)], 1)
    embedded = model.cnn_model(img[:2])
    model.compile(
        optimizer=keras.optimizers.Adam(1e-3), loss=keras.losses.SparseCategoricalCrossentropy(reduction="none")
    )
    model._compute_caption_loss_and_acc(embedded, captions[:2, 0])
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((img, captions)).batch(BATCH))


EXAMPLES = (
    text_classification_transformer,
    translation_transformer,
    masked_loss_and_accuracy,
    named_entity_transformer,
    masked_language_model,
    switch_transformer,
    fnet,
    captcha_ocr,
    ctc_speech_recognition,
    speech_transformer,
    image_captioning,
)
