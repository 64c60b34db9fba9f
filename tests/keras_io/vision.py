"""Examples with images and points."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, EPOCHS, SAMPLES, Loop, Training, classes, images, numbers


def masked_image_modeling():
    """Masked image modeling with autoencoders: random indices by `argsort` of noise, gathers in the batch."""

    patches, mask_proportion, width = 16, 0.75, 6

    class PatchEncoder(layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.seeds = keras.random.SeedGenerator(3)
            self.mask_token = self.add_weight(shape=(1, 12), initializer="random_normal", trainable=True)
            self.projection = layers.Dense(units=width)
            self.position_embedding = layers.Embedding(input_dim=patches, output_dim=width)
            self.num_mask = int(mask_proportion * patches)

        def call(self, patch_rows):
            batch_size = tf.shape(patch_rows)[0]
            positions = tf.range(start=0, limit=patches, delta=1)
            pos_embeddings = self.position_embedding(positions[tf.newaxis, ...])
            pos_embeddings = tf.tile(pos_embeddings, [batch_size, 1, 1])
            patch_embeddings = self.projection(patch_rows) + pos_embeddings
            mask_indices, unmask_indices = self.get_random_indices(batch_size)
            unmasked_embeddings = tf.gather(patch_embeddings, unmask_indices, axis=1, batch_dims=1)
            unmasked_positions = tf.gather(pos_embeddings, unmask_indices, axis=1, batch_dims=1)
            masked_positions = tf.gather(pos_embeddings, mask_indices, axis=1, batch_dims=1)
            mask_tokens = tf.repeat(self.mask_token.value, repeats=self.num_mask, axis=0)
            mask_tokens = tf.repeat(mask_tokens[tf.newaxis, ...], repeats=batch_size, axis=0)
            masked_embeddings = self.projection(mask_tokens) + masked_positions
            return unmasked_embeddings, masked_embeddings, unmasked_positions, mask_indices, unmask_indices

        def get_random_indices(self, batch_size):
            noise = keras.random.uniform(shape=(batch_size, patches), seed=self.seeds)
            rand_indices = tf.argsort(noise, axis=-1)
            return rand_indices[:, : self.num_mask], rand_indices[:, self.num_mask :]

    class MaskedAutoencoder(keras.Model):
        def __init__(self):
            super().__init__()
            self.patch_encoder = PatchEncoder()
            self.encoder = layers.MultiHeadAttention(2, 4, dropout=0.1)
            self.decoder = keras.Sequential([layers.Dense(width, activation="gelu"), layers.Flatten()])
            self.to_image = keras.Sequential([layers.Dense(64 * 3, activation="sigmoid")])

        def to_patches(self, images):
            found = tf.image.extract_patches(images, [1, 2, 2, 1], [1, 2, 2, 1], [1, 1, 1, 1], "VALID")
            return tf.reshape(found, (-1, patches, 12))

        def calculate_loss(self, images, test=False):
            rows = self.to_patches(images)
            unmasked, masked, unmasked_positions, mask_indices, _ = self.patch_encoder(rows)
            encoder_outputs = self.encoder(unmasked, unmasked) + unmasked_positions
            decoder_inputs = tf.concat([encoder_outputs, masked], axis=1)
            decoder_outputs = self.to_image(self.decoder(decoder_inputs))
            decoder_outputs = tf.reshape(decoder_outputs, (-1, 8, 8, 3))
            decoder_patches = self.to_patches(decoder_outputs)
            loss_patch = tf.gather(rows, mask_indices, axis=1, batch_dims=1)
            loss_output = tf.gather(decoder_patches, mask_indices, axis=1, batch_dims=1)
            total_loss = self.compute_loss(y=loss_patch, y_pred=loss_output)
            return total_loss, loss_patch, loss_output

        def train_step(self, images):
            with tf.GradientTape() as tape:
                total_loss, loss_patch, loss_output = self.calculate_loss(images)
            train_vars = self.trainable_variables
            grads = tape.gradient(total_loss, train_vars)
            self.optimizer.apply_gradients(list(zip(grads, train_vars, strict=True)))
            results = {}
            for metric in self.metrics:
                metric.update_state(loss_patch, loss_output) if metric.name != "loss" else metric.update_state(
                    total_loss
                )
                results[metric.name] = metric.result()
            return results

    model = MaskedAutoencoder()
    model.compile(optimizer=keras.optimizers.AdamW(0.01), loss=keras.losses.MeanSquaredError(), metrics=["mae"])
    model.calculate_loss(images(8, 3)[:2])
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(images(8, 3)).batch(BATCH))


def pointnet():
    """PointNet: an orthogonal regularizer of features, transforms by each sample's own matrix."""

    class OrthogonalRegularizer(keras.regularizers.Regularizer):
        def __init__(self, num_features, l2reg=0.001):
            self.num_features = num_features
            self.l2reg = l2reg
            self.eye = ops.eye(num_features)

        def __call__(self, x):
            x = ops.reshape(x, (-1, self.num_features, self.num_features))
            xxt = ops.tensordot(x, x, axes=(2, 2))
            xxt = ops.reshape(xxt, (-1, self.num_features, self.num_features))
            return ops.sum(self.l2reg * ops.square(xxt - self.eye))

    def tnet(inputs, num_features):
        bias = keras.initializers.Constant(np.eye(num_features).flatten())
        x = layers.GlobalMaxPooling1D()(layers.Activation("relu")(layers.Conv1D(4, 1)(inputs)))
        x = layers.Dense(
            num_features * num_features,
            kernel_initializer="zeros",
            bias_initializer=bias,
            activity_regularizer=OrthogonalRegularizer(num_features),
        )(x)
        feat_t = layers.Reshape((num_features, num_features))(x)
        return layers.Dot(axes=(2, 1))([inputs, feat_t])

    inputs = keras.Input(shape=(10, 3))
    x = layers.Conv1D(5, 1, activation="relu")(tnet(inputs, 3))
    x = layers.GlobalMaxPooling1D()(layers.Conv1D(6, 1, activation="relu")(tnet(x, 5)))
    x = layers.Dropout(0.3)(layers.Dense(6, activation="relu")(x))
    model = keras.Model(inputs=inputs, outputs=layers.Dense(3, activation="softmax")(x), name="pointnet")
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=keras.optimizers.Adam(learning_rate=0.001),
        metrics=["sparse_categorical_accuracy"],
    )
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((numbers(10, 3), classes(3))).batch(BATCH))


def mixup_and_cutmix():
    """MixUp and CutMix in the step: permutations of the batch, a beta distribution from gammas, boxes of images."""

    class Mixing(keras.Model):
        def __init__(self, net):
            super().__init__()
            self.net = net
            self.seeds = keras.random.SeedGenerator(8)

        def call(self, x, training=False):
            return self.net(x, training=training)

        def mix_up(self, images, labels):
            count = tf.shape(images)[0]
            order = tf.argsort(keras.random.uniform((count,), seed=self.seeds))
            one = keras.random.gamma((count, 1), 0.2, seed=self.seeds)
            other = keras.random.gamma((count, 1), 0.2, seed=self.seeds)
            share = one / (one + other + 1e-12)
            mixed = share[:, :, None, None] * images + (1 - share[:, :, None, None]) * tf.gather(images, order)
            return mixed, share * labels + (1 - share) * tf.gather(labels, order)

        def cut_mix(self, images, labels):
            count = ops.shape(images)[0]
            begin = keras.random.randint((count, 2), 0, 5, seed=self.seeds)
            places = ops.arange(8, dtype=begin.dtype)
            inside = [
                ops.logical_and(places[None] >= begin[:, each, None], places[None] < begin[:, each, None] + 4)
                for each in range(2)
            ]
            box = ops.cast(ops.logical_and(inside[0][:, :, None], inside[1][:, None, :]), images.dtype)[..., None]
            other = ops.flip(images, axis=0)
            share = ops.mean(box, axis=(1, 2))
            return box * other + (1 - box) * images, share * ops.flip(labels, axis=0) + (1 - share) * labels

        def train_step(self, data):
            x, y = data
            x, y = self.mix_up(x, y)
            x, y = self.cut_mix(x, y)
            return super().train_step((x, y))

    net = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(3)])
    model = Mixing(net)
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return Training(model=model, x=images(8, 3), y=np.eye(3)[classes(3)])


def fixmatch():
    """FixMatch: pseudo-labels above a threshold, a masked mean, weights that are averaged, a ramp by the step."""

    class FixMatch(keras.Model):
        def __init__(self, threshold=0.35):
            super().__init__()
            self.net, self.average = (
                keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(3)])
                for _ in range(2)
            )
            self.average.set_weights(self.net.get_weights())
            self.average.trainable = False
            self.threshold = threshold
            self.seeds = keras.random.SeedGenerator(2)
            self.supervised = keras.metrics.Mean(name="supervised")
            self.kept = keras.metrics.Mean(name="kept")

        @property
        def metrics(self):
            return [self.supervised, self.kept]

        def train_step(self, data):
            labeled, unlabeled, labels = data
            weak = unlabeled + 0.05 * keras.random.normal(ops.shape(unlabeled), seed=self.seeds)
            strong = keras.random.dropout(unlabeled, 0.4, seed=self.seeds)
            with tf.GradientTape() as tape:
                logits = self.net(tf.concat([labeled, weak, strong], axis=0), training=True)
                of_labeled, of_weak, of_strong = tf.split(logits, 3)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, of_labeled))
                pseudo = tf.stop_gradient(tf.nn.softmax(of_weak))
                mask = tf.cast(tf.reduce_max(pseudo, axis=1) >= self.threshold, loss.dtype)
                each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(pseudo, axis=1), of_strong)
                ramp = tf.minimum(tf.cast(self.optimizer.iterations.value, tf.float64) / 4.0, 1.0)
                total = loss + ramp * tf.reduce_mean(mask * each)
            self.optimizer.apply(tape.gradient(total, self.net.trainable_variables), self.net.trainable_variables)
            for slow, fast in zip(self.average.weights, self.net.weights, strict=True):
                slow.assign(0.9 * slow + 0.1 * fast)
            self.supervised.update_state(loss)
            self.kept.update_state(mask)
            return {**{m.name: m.result() for m in self.metrics}, "total": total}

    model = FixMatch()
    model.compile(keras.optimizers.Adam(0.01))
    data = tf.data.Dataset.from_tensor_slices((numbers(6), numbers(6, seed=5), classes(3)))
    return Training(model=model, x=data.batch(BATCH))


def zero_dce():
    """Zero-DCE: losses of images alone, classes with convolutions of fixed kernels, own `compute_losses`."""

    class SpatialConsistencyLoss(keras.losses.Loss):
        def __init__(self, **kwargs):
            super().__init__(reduction="none")
            self.kernels = [np.zeros((3, 3, 1, 1)) for _ in range(4)]
            for kernel, place in zip(self.kernels, ((1, 0), (1, 2), (0, 1), (2, 1)), strict=True):
                kernel[1, 1], kernel[place] = 1.0, -1.0

        def call(self, y_true, y_pred):
            means = [tf.reduce_mean(each, 3, keepdims=True) for each in (y_true, y_pred)]
            pools = [tf.nn.avg_pool2d(each, ksize=4, strides=4, padding="VALID") for each in means]
            return sum(
                tf.square(
                    tf.nn.conv2d(pools[0], kernel, strides=[1] * 4, padding="SAME")
                    - tf.nn.conv2d(pools[1], kernel, strides=[1] * 4, padding="SAME")
                )
                for kernel in self.kernels
            )

    def color_constancy_loss(x):
        mean_rgb = tf.reduce_mean(x, axis=(1, 2), keepdims=True)
        mr, mg, mb = (mean_rgb[:, :, :, each] for each in range(3))
        return tf.sqrt(tf.square(tf.square(mr - mg)) + tf.square(tf.square(mr - mb)) + tf.square(tf.square(mb - mg)))

    def exposure_loss(x, mean_val=0.6):
        mean = tf.nn.avg_pool2d(tf.reduce_mean(x, axis=3, keepdims=True), ksize=4, strides=4, padding="VALID")
        return tf.reduce_mean(tf.square(mean - mean_val))

    def illumination_smoothness_loss(x):
        batch_size, h_x, w_x = tf.shape(x)[0], tf.shape(x)[1], tf.shape(x)[2]
        count_h = (tf.shape(x)[2] - 1) * tf.shape(x)[3]
        count_w = tf.shape(x)[2] * (tf.shape(x)[3] - 1)
        h_tv = tf.reduce_sum(tf.square(x[:, 1:, :, :] - x[:, : h_x - 1, :, :]))
        w_tv = tf.reduce_sum(tf.square(x[:, :, 1:, :] - x[:, :, : w_x - 1, :]))
        batch_size, count_h, count_w = (tf.cast(each, tf.float64) for each in (batch_size, count_h, count_w))
        return 2 * (h_tv / count_h + w_tv / count_w) / batch_size

    class ZeroDCE(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            inputs = keras.Input((8, 8, 3))
            conv1 = layers.Conv2D(4, 3, activation="relu", padding="same")(inputs)
            outputs = layers.Conv2D(6, 3, activation="tanh", padding="same")(layers.Concatenate()([conv1, inputs]))
            self.dce_model = keras.Model(inputs, outputs)

        def compile(self, learning_rate, **kwargs):
            super().compile(**kwargs)
            self.optimizer = keras.optimizers.Adam(learning_rate=learning_rate)
            self.spatial_constancy_loss = SpatialConsistencyLoss(reduction="none")
            names = ("total_loss", "illumination_smoothness_loss", "spatial_constancy_loss", "exposure_loss")
            self.trackers = [keras.metrics.Mean(name=name) for name in names]

        @property
        def metrics(self):
            return self.trackers

        def get_enhanced_image(self, data, output):
            x = data
            for each in tf.split(output, 2, axis=-1):
                x = x + each * (tf.square(x) - x)
            return x

        def call(self, data):
            return self.get_enhanced_image(data, self.dce_model(data))

        def compute_losses(self, data, output):
            enhanced_image = self.get_enhanced_image(data, output)
            loss_illumination = 200 * illumination_smoothness_loss(output)
            loss_spatial_constancy = tf.reduce_mean(self.spatial_constancy_loss(enhanced_image, data))
            loss_color_constancy = 5 * tf.reduce_mean(color_constancy_loss(enhanced_image))
            loss_exposure = 10 * tf.reduce_mean(exposure_loss(enhanced_image))
            total = loss_illumination + loss_spatial_constancy + loss_color_constancy + loss_exposure
            return total, loss_illumination, loss_spatial_constancy, loss_exposure

        def train_step(self, data):
            with tf.GradientTape() as tape:
                losses = self.compute_losses(data, self.dce_model(data))
            gradients = tape.gradient(losses[0], self.dce_model.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.dce_model.trainable_weights, strict=True))
            for tracker, loss in zip(self.trackers, losses, strict=True):
                tracker.update_state(loss)
            return {metric.name: metric.result() for metric in self.metrics}

        def test_step(self, data):
            losses = self.compute_losses(data, self.dce_model(data))
            for tracker, loss in zip(self.trackers, losses, strict=True):
                tracker.update_state(loss)
            return {metric.name: metric.result() for metric in self.metrics}

    model = ZeroDCE()
    model.compile(learning_rate=1e-4)
    data = tf.data.Dataset.from_tensor_slices(images(8, 3))
    return Training(model=model, x=data.batch(BATCH), fit={"validation_data": data.take(8).batch(8)})


def charbonnier_and_psnr():
    """Low-light enhancement with MIRNet: a Charbonnier loss and a PSNR metric as functions."""

    def charbonnier_loss(y_true, y_pred):
        return tf.reduce_mean(tf.sqrt(tf.square(y_true - y_pred) + 1e-3**2))

    def peak_signal_noise_ratio(y_true, y_pred):
        return tf.image.psnr(y_pred, y_true, max_val=255.0)

    inputs = keras.Input((8, 8, 3))
    channel = layers.GlobalAveragePooling2D(keepdims=True)(layers.Conv2D(4, 3, padding="same")(inputs))
    gate = layers.Activation("sigmoid")(layers.Conv2D(3, 1)(channel))
    model = keras.Model(inputs, layers.Conv2D(3, 3, padding="same")(inputs * gate))
    model.compile(keras.optimizers.Adam(1e-3), loss=charbonnier_loss, metrics=[peak_signal_noise_ratio])
    return Training(model=model, x=images(8, 3), y=images(8, 3, seed=4))


def stochastic_depth():
    """Compact convolutional transformers: stochastic depth by samples, sequence pooling, learned positions."""

    class StochasticDepth(layers.Layer):
        def __init__(self, drop_prop, **kwargs):
            super().__init__(**kwargs)
            self.drop_prob = drop_prop
            self.seed_generator = keras.random.SeedGenerator(1337)

        def call(self, x, training=None):
            if training:
                keep_prob = 1 - self.drop_prob
                shape = (ops.shape(x)[0],) + (1,) * (len(x.shape) - 1)
                random_tensor = keep_prob + keras.random.uniform(shape, 0, 1, seed=self.seed_generator)
                random_tensor = ops.floor(random_tensor)
                return (x / keep_prob) * random_tensor
            return x

    class SequencePooling(layers.Layer):
        def __init__(self):
            super().__init__()
            self.attention = layers.Dense(1)

        def call(self, x):
            attention_weights = ops.softmax(self.attention(x), axis=1)
            attention_weights = ops.transpose(attention_weights, axes=(0, 2, 1))
            weighted_representation = ops.matmul(attention_weights, x)
            return ops.squeeze(weighted_representation, -2)

    inputs = keras.Input((8, 8, 3))
    x = layers.Reshape((-1, 4))(layers.MaxPool2D(2)(layers.Conv2D(4, 3, padding="same", activation="relu")(inputs)))
    attended = layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x)
    x = layers.LayerNormalization()(layers.Add()([StochasticDepth(0.3)(attended), x]))
    model = keras.Model(inputs, layers.Dense(3)(SequencePooling()(x)))
    model.compile(
        keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001),
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        metrics=[keras.metrics.CategoricalAccuracy(name="accuracy")],
    )
    return Training(model=model, x=images(8, 3), y=np.eye(3)[classes(3)])


def involution():
    """Involution: a layer with a kernel for each pixel, by patches; learnable resizing with `ops.image.resize`."""

    class Involution(layers.Layer):
        def __init__(self, channel, group_number, kernel_size, **kwargs):
            super().__init__(**kwargs)
            self.channel, self.group_number, self.kernel_size = channel, group_number, kernel_size

        def build(self, input_shape):
            _, self.height, self.width, num_channels = input_shape
            self.gen = keras.Sequential([layers.Conv2D(2, 1), layers.ReLU(), layers.Conv2D(self.kernel_size**2, 1)])
            self.input_patches_reshape = layers.Reshape(
                (self.height, self.width, self.kernel_size**2, num_channels // self.group_number, self.group_number)
            )

        def call(self, x):
            kernel = ops.expand_dims(ops.expand_dims(self.gen(x), -1), -1)
            patches = tf.image.extract_patches(
                x, [1, self.kernel_size, self.kernel_size, 1], [1] * 4, [1] * 4, padding="SAME"
            )
            output = ops.sum(ops.multiply(kernel, self.input_patches_reshape(patches)), axis=3)
            return ops.reshape(output, (ops.shape(x)[0], self.height, self.width, self.channel))

    class Resizer(layers.Layer):
        def __init__(self):
            super().__init__()
            self.conv = layers.Conv2D(3, 3, padding="same")

        def call(self, x):
            return ops.image.resize(self.conv(x), (6, 6)) + ops.image.resize(x, (6, 6), interpolation="bilinear")

    inputs = keras.Input((8, 8, 3))
    x = layers.ReLU()(Involution(3, 1, 3)(Resizer()(inputs)))
    model = keras.Model(inputs, layers.Dense(3)(layers.Flatten()(layers.MaxPooling2D((2, 2))(x))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return Training(model=model, x=images(8, 3), y=classes(3))


def gradient_centralization_and_sam():
    """Gradient centralization and sharpness-aware minimization: an optimizer and a step that takes gradients twice."""

    class GCRMSprop(keras.optimizers.RMSprop):
        def apply(self, grads, trainable_variables=None):
            centered = []
            for grad in grads:
                if grad is not None and len(grad.shape) > 1:
                    axis = list(range(len(grad.shape) - 1))
                    grad -= ops.mean(grad, axis=axis, keepdims=True)
                centered.append(grad)
            return super().apply(centered, trainable_variables)

    class SAMModel(keras.Model):
        def __init__(self, resnet_model, rho=0.05):
            super().__init__()
            self.resnet_model = resnet_model
            self.rho = rho

        def train_step(self, data):
            (images, labels) = data
            e_ws = []
            with tf.GradientTape() as tape:
                predictions = self.resnet_model(images)
                loss = self.compute_loss(y=labels, y_pred=predictions)
            trainable_params = self.resnet_model.trainable_variables
            gradients = tape.gradient(loss, trainable_params)
            grad_norm = tf.norm([tf.norm(each) for each in gradients])
            scale = self.rho / (grad_norm + 1e-12)
            for grad, param in zip(gradients, trainable_params, strict=True):
                e_w = grad * scale
                param.assign_add(e_w)
                e_ws.append(e_w)
            with tf.GradientTape() as tape:
                predictions = self.resnet_model(images)
                loss = self.compute_loss(y=labels, y_pred=predictions)
            sam_gradients = tape.gradient(loss, trainable_params)
            for param, e_w in zip(trainable_params, e_ws, strict=True):
                param.assign_sub(e_w)
            self.optimizer.apply_gradients(zip(sam_gradients, trainable_params, strict=True))
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(labels, predictions)
            return {m.name: m.result() for m in self.metrics}

        def call(self, x):
            return self.resnet_model(x)

    net = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, activation="relu"), layers.Flatten(), layers.Dense(3)]
    )
    model = SAMModel(net)
    model.compile(
        GCRMSprop(learning_rate=1e-3),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return Training(model=model, x=images(8, 3), y=classes(3))


def attention_multiple_instances():
    """Classification by attention-based multiple instance learning: bags as lists of inputs, gated attention."""

    class MILAttentionLayer(layers.Layer):
        def __init__(self, weight_params_dim, **kwargs):
            super().__init__(**kwargs)
            self.weight_params_dim = weight_params_dim

        def build(self, input_shape):
            dim = input_shape[0][1]
            make = {"initializer": "glorot_uniform", "trainable": True, "regularizer": keras.regularizers.L2(0.01)}
            self.v_weight_params = self.add_weight(shape=(dim, self.weight_params_dim), name="v", **make)
            self.w_weight_params = self.add_weight(shape=(self.weight_params_dim, 1), name="w", **make)
            self.u_weight_params = self.add_weight(shape=(dim, self.weight_params_dim), name="u", **make)

        def call(self, inputs):
            instances = [self.compute_attention_scores(instance) for instance in inputs]
            instances = ops.stack(instances)
            alpha = ops.softmax(instances, axis=0)
            return [alpha[i] for i in range(alpha.shape[0])]

        def compute_attention_scores(self, instance):
            original_instance = instance
            instance = ops.tanh(ops.tensordot(instance, self.v_weight_params, axes=1))
            instance = instance * ops.sigmoid(ops.tensordot(original_instance, self.u_weight_params, axes=1))
            return ops.tensordot(instance, self.w_weight_params, axes=1)

    inputs = [keras.Input((8, 8, 1)) for _ in range(3)]
    shared_1, shared_2 = layers.Dense(6, activation="relu"), layers.Dense(4, activation="relu")
    embeddings = [shared_2(shared_1(layers.Flatten()(each))) for each in inputs]
    alpha = MILAttentionLayer(5, name="alpha")(embeddings)
    multiply_layers = [layers.multiply([alpha[i], embeddings[i]]) for i in range(3)]
    model = keras.Model(inputs, layers.Dense(2, activation="softmax")(layers.concatenate(multiply_layers, axis=1)))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Training(model=model, x=[images(8, seed=seed) for seed in range(3)], y=classes(2, 1))


def reptile():
    """Few-shot learning with Reptile: a loop of its own, gradients by a step, weights interpolated."""

    def run(steps):
        inputs = keras.Input(shape=(8, 8, 1))
        x = layers.Flatten()(layers.Conv2D(4, 3, strides=2, activation="relu")(inputs))
        model = keras.Model(inputs, layers.Dense(3, activation="softmax")(x))
        optimizer = keras.optimizers.SGD(learning_rate=0.03)
        optimizer.build(model.trainable_variables)

        @steps.compiled
        def train_step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y, model(x)))
            grads = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(grads, model.trainable_weights, strict=True))
            return loss

        history = {"loss": []}
        x, y = images(8), classes(3)
        for meta_iter in range(EPOCHS):
            cur_meta_step_size = (1 - meta_iter / EPOCHS) * 0.25
            old_vars = model.get_weights()
            for begin in range(0, SAMPLES, BATCH):
                history["loss"].append(
                    float(train_step(*steps.mine(x[begin : begin + BATCH], y[begin : begin + BATCH])))
                )
            new_vars = model.get_weights()
            moved = [old + (new - old) * cur_meta_step_size for old, new in zip(old_vars, new_vars, strict=True)]
            model.set_weights(moved)
        return model.get_weights(), history

    return Loop(run)


EXAMPLES = (
    masked_image_modeling,
    pointnet,
    mixup_and_cutmix,
    fixmatch,
    zero_dce,
    charbonnier_and_psnr,
    stochastic_depth,
    involution,
    gradient_centralization_and_sam,
    attention_multiple_instances,
    reptile,
)
