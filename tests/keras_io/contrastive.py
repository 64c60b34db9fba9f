"""Examples that compare samples: contrastive, metric and self-supervised learning, and distillation."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, Training, batch_normalization, classes, images, numbers


def simclr():
    """SimCLR: two random augmentations, negatives in the batch, a labeled and an unlabeled dataset, two optimizers."""

    class RandomColorAffine(layers.Layer):
        def __init__(self, brightness=0, jitter=0, **kwargs):
            super().__init__(**kwargs)
            self.seed_generator = keras.random.SeedGenerator(1337)
            self.brightness = brightness
            self.jitter = jitter

        def call(self, images, training=True):
            if training:
                batch_size = ops.shape(images)[0]
                brightness_scales = 1 + keras.random.uniform(
                    (batch_size, 1, 1, 1), minval=-self.brightness, maxval=self.brightness, seed=self.seed_generator
                )
                jitter_matrices = keras.random.uniform(
                    (batch_size, 1, 3, 3), minval=-self.jitter, maxval=self.jitter, seed=self.seed_generator
                )
                color_transforms = (
                    ops.tile(ops.expand_dims(ops.eye(3), axis=0), (batch_size, 1, 1, 1)) * brightness_scales
                    + jitter_matrices
                )
                images = ops.clip(ops.matmul(images, color_transforms), 0, 1)
            return images

    def augmenter(brightness, jitter, name):
        return keras.Sequential(
            [keras.Input((8, 8, 3)), layers.RandomFlip("horizontal"), RandomColorAffine(brightness, jitter)], name=name
        )

    class ContrastiveModel(keras.Model):
        def __init__(self):
            super().__init__()
            self.temperature = 0.1
            self.contrastive_augmenter = augmenter(0.6, 0.2, "contrastive")
            self.classification_augmenter = augmenter(0.3, 0.1, "classification")
            self.encoder = keras.Sequential(
                [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(6)],
                name="encoder",
            )
            self.projection_head = keras.Sequential(
                [keras.Input((6,)), layers.Dense(6, activation="relu"), layers.Dense(6)], name="projection_head"
            )
            self.linear_probe = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="linear_probe")

        def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
            super().compile(**kwargs)
            self.contrastive_optimizer = contrastive_optimizer
            self.probe_optimizer = probe_optimizer
            self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.contrastive_loss_tracker = keras.metrics.Mean(name="c_loss")
            self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
            self.probe_loss_tracker = keras.metrics.Mean(name="p_loss")
            self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

        @property
        def metrics(self):
            return [
                self.contrastive_loss_tracker,
                self.contrastive_accuracy,
                self.probe_loss_tracker,
                self.probe_accuracy,
            ]

        def contrastive_loss(self, projections_1, projections_2):
            projections_1 = ops.normalize(projections_1, axis=1)
            projections_2 = ops.normalize(projections_2, axis=1)
            similarities = ops.matmul(projections_1, ops.transpose(projections_2)) / self.temperature
            batch_size = ops.shape(projections_1)[0]
            contrastive_labels = ops.arange(batch_size)
            self.contrastive_accuracy.update_state(contrastive_labels, similarities)
            self.contrastive_accuracy.update_state(contrastive_labels, ops.transpose(similarities))
            loss_1_2 = keras.losses.sparse_categorical_crossentropy(contrastive_labels, similarities, from_logits=True)
            loss_2_1 = keras.losses.sparse_categorical_crossentropy(
                contrastive_labels, ops.transpose(similarities), from_logits=True
            )
            return (loss_1_2 + loss_2_1) / 2

        def train_step(self, data):
            (unlabeled_images, _), (labeled_images, labels) = data
            images = ops.concatenate((unlabeled_images, labeled_images), axis=0)
            augmented_images_1 = self.contrastive_augmenter(images, training=True)
            augmented_images_2 = self.contrastive_augmenter(images, training=True)
            with tf.GradientTape() as tape:
                projections_1 = self.projection_head(self.encoder(augmented_images_1, training=True), training=True)
                projections_2 = self.projection_head(self.encoder(augmented_images_2, training=True), training=True)
                contrastive_loss = self.contrastive_loss(projections_1, projections_2)
            weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
            gradients = tape.gradient(contrastive_loss, weights)
            self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
            self.contrastive_loss_tracker.update_state(contrastive_loss)
            preprocessed_images = self.classification_augmenter(labeled_images, training=True)
            with tf.GradientTape() as tape:
                class_logits = self.linear_probe(self.encoder(preprocessed_images, training=False), training=True)
                probe_loss = self.probe_loss(labels, class_logits)
            gradients = tape.gradient(probe_loss, self.linear_probe.trainable_weights)
            self.probe_optimizer.apply_gradients(zip(gradients, self.linear_probe.trainable_weights, strict=True))
            self.probe_loss_tracker.update_state(probe_loss)
            self.probe_accuracy.update_state(labels, class_logits)
            return {m.name: m.result() for m in self.metrics}

        def test_step(self, data):
            labeled_images, labels = data
            preprocessed_images = self.classification_augmenter(labeled_images, training=False)
            class_logits = self.linear_probe(self.encoder(preprocessed_images, training=False), training=False)
            self.probe_loss_tracker.update_state(self.probe_loss(labels, class_logits))
            self.probe_accuracy.update_state(labels, class_logits)
            return {m.name: m.result() for m in self.metrics[2:]}

    model = ContrastiveModel()
    model.compile(contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam())
    labels = classes(3)
    unlabeled = tf.data.Dataset.from_tensor_slices((images(8, 3)[:24], labels[:24])).batch(8)
    labeled = tf.data.Dataset.from_tensor_slices((images(8, 3, seed=3)[:12], labels[:12])).batch(4)
    return Training(model=model, x=tf.data.Dataset.zip((unlabeled, labeled)), fit={"validation_data": labeled.take(2)})


def supervised_contrastive():
    """Supervised contrastive learning: a loss class with the labels of the batch against one another."""

    def npairs_loss(y_true, y_pred):
        y_pred = ops.cast(y_pred, "float64")
        y_true = ops.cast(ops.expand_dims(y_true, -1), y_pred.dtype)
        y_true = ops.cast(ops.equal(y_true, ops.transpose(y_true)), y_pred.dtype)
        y_true /= ops.sum(y_true, 1, keepdims=True)
        loss = ops.categorical_crossentropy(y_true, y_pred, from_logits=True)
        return ops.mean(loss)

    class SupervisedContrastiveLoss(keras.losses.Loss):
        def __init__(self, temperature=1, name=None):
            super().__init__(name=name)
            self.temperature = temperature

        def __call__(self, labels, feature_vectors, sample_weight=None):
            feature_vectors_normalized = keras.utils.normalize(feature_vectors, axis=1, order=2)
            logits = ops.divide(
                ops.matmul(feature_vectors_normalized, ops.transpose(feature_vectors_normalized)), self.temperature
            )
            return npairs_loss(ops.reshape(labels, [-1]), logits)

    inputs = keras.Input(shape=(8, 8, 3))
    features = layers.GlobalAveragePooling2D()(layers.Conv2D(6, 3, activation="relu")(inputs))
    model = keras.Model(inputs, layers.Dense(5, activation="relu")(features))
    model.compile(optimizer=keras.optimizers.Adam(0.001), loss=SupervisedContrastiveLoss(0.05))
    return Training(model=model, x=images(8, 3), y=classes(3, 1))


def siamese_triplet():
    """Siamese network with a triplet loss: `train_step` and `test_step` over a layer of distances."""

    embedding = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dense(5)], name="Embedding"
    )

    class DistanceLayer(layers.Layer):
        def call(self, anchor, positive, negative):
            ap_distance = ops.sum(tf.square(anchor - positive), -1)
            an_distance = ops.sum(tf.square(anchor - negative), -1)
            return (ap_distance, an_distance)

    inputs = [keras.Input(name=name, shape=(8, 8, 3)) for name in ("anchor", "positive", "negative")]
    siamese_network = keras.Model(inputs=inputs, outputs=DistanceLayer()(*map(embedding, inputs)))

    class SiameseModel(keras.Model):
        def __init__(self, siamese_network, margin=0.5):
            super().__init__()
            self.siamese_network = siamese_network
            self.margin = margin
            self.loss_tracker = keras.metrics.Mean(name="loss")

        def call(self, inputs):
            return self.siamese_network(inputs)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self._compute_loss(data)
            gradients = tape.gradient(loss, self.siamese_network.trainable_weights)
            self.optimizer.apply_gradients(zip(gradients, self.siamese_network.trainable_weights, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

        def test_step(self, data):
            loss = self._compute_loss(data)
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

        def _compute_loss(self, data):
            ap_distance, an_distance = self.siamese_network(data)
            loss = ap_distance - an_distance
            return tf.maximum(loss + self.margin, 0.0)

        @property
        def metrics(self):
            return [self.loss_tracker]

    model = SiameseModel(siamese_network)
    model.compile(optimizer=keras.optimizers.Adam(0.0001), weighted_metrics=[])
    triplets = tf.data.Dataset.zip(
        tuple(tf.data.Dataset.from_tensor_slices(images(8, 3, seed=seed)) for seed in range(3))
    )
    return Training(model=model, x=triplets.batch(BATCH), fit={"validation_data": triplets.take(8).batch(8)})


def siamese_contrastive():
    """Siamese network with a contrastive loss (SyncBatchNormalization): the loss, and a Lambda layer of distances."""

    def euclidean_distance(vects):
        x, y = vects
        sum_square = ops.sum(ops.square(x - y), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(sum_square, keras.backend.epsilon()))

    def loss(margin=1):
        def contrastive_loss(y_true, y_pred):
            square_pred = ops.square(y_pred)
            margin_square = ops.square(ops.maximum(margin - (y_pred), 0))
            return ops.mean((1 - y_true) * square_pred + (y_true) * margin_square)

        return contrastive_loss

    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(4, 3, activation="tanh")(batch_normalization()(inputs))
    x = batch_normalization()(layers.Flatten()(layers.AveragePooling2D(2)(x)))
    embedding_network = keras.Model(inputs, layers.Dense(4, activation="tanh")(x))
    input_1, input_2 = keras.Input((8, 8, 1)), keras.Input((8, 8, 1))
    merged = layers.Lambda(euclidean_distance, output_shape=(1,))(
        [embedding_network(input_1), embedding_network(input_2)]
    )
    outputs = layers.Dense(1, activation="sigmoid")(batch_normalization()(merged))
    model = keras.Model(inputs=[input_1, input_2], outputs=outputs)
    model.compile(loss=loss(margin=1), optimizer="RMSprop", metrics=["accuracy"])
    return Training(
        model=model,
        x=[images(8), images(8, seed=2)],
        y=classes(2, 1).astype("float64"),
    )


def metric_learning():
    """Metric learning: a `train_step` that compares anchors with positives, and takes the compiled loss."""

    class EmbeddingModel(keras.Model):
        def train_step(self, data):
            if isinstance(data, tuple):
                data = data[0]
            anchors, positives = data[:, 0], data[:, 1]
            with tf.GradientTape() as tape:
                anchor_embeddings = self(anchors, training=True)
                positive_embeddings = self(positives, training=True)
                similarities = ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
                temperature = 0.2
                similarities /= temperature
                sparse_labels = ops.arange(ops.shape(anchors)[0])
                loss = self.compute_loss(y=sparse_labels, y_pred=similarities)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(sparse_labels, similarities)
            return {m.name: m.result() for m in self.metrics}

    inputs = layers.Input(shape=(8, 8, 3))
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(filters=6, kernel_size=3, strides=2, activation="relu")(inputs))
    embeddings = layers.UnitNormalization()(layers.Dense(units=4, activation=None)(x))
    model = EmbeddingModel(inputs, embeddings)
    model.compile(
        optimizer=keras.optimizers.Adam(learning_rate=1e-3),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
    )
    pairs = np.stack([images(8, 3), images(8, 3, seed=4)], 1)
    return Training(model=model, x=pairs)


def barlow_twins():
    """Barlow Twins (SyncBatchNormalization): a loss class with the batch's cross-correlation."""

    class BarlowLoss(keras.losses.Loss):
        def __init__(self, batch_size):
            super().__init__()
            self.lambda_amt = 5e-3
            self.batch_size = batch_size

        def get_off_diag(self, c):
            zero_diag = tf.zeros(c.shape[-1], dtype=c.dtype)
            return tf.linalg.set_diag(c, zero_diag)

        def cross_corr_matrix_loss(self, c):
            c_diff = tf.pow(tf.linalg.diag_part(c) - 1, 2)
            off_diag = tf.pow(self.get_off_diag(c), 2) * self.lambda_amt
            return tf.reduce_sum(c_diff) + tf.reduce_sum(off_diag)

        def normalize(self, output):
            return (output - tf.reduce_mean(output, axis=0)) / tf.math.reduce_std(output, axis=0)

        def cross_corr_matrix(self, z_a_norm, z_b_norm):
            return (tf.transpose(z_a_norm) @ z_b_norm) / self.batch_size

        def call(self, z_a, z_b):
            z_a_norm, z_b_norm = self.normalize(z_a), self.normalize(z_b)
            return self.cross_corr_matrix_loss(self.cross_corr_matrix(z_a_norm, z_b_norm))

    class BarlowModel(keras.Model):
        def __init__(self, encoder):
            super().__init__()
            self.encoder = encoder
            self.loss_tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_tracker]

        def train_step(self, batch):
            y_a, y_b = batch
            with tf.GradientTape() as tape:
                z_a, z_b = self.encoder(y_a, training=True), self.encoder(y_b, training=True)
                loss = self.loss(z_a, z_b)
            grads_model = tape.gradient(loss, self.encoder.trainable_variables)
            self.optimizer.apply_gradients(zip(grads_model, self.encoder.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    inputs = keras.Input((8, 8, 3))
    x = layers.Flatten()(layers.Conv2D(4, 3, 2, use_bias=False)(inputs))
    x = layers.ReLU()(batch_normalization()(layers.Dense(8, use_bias=False)(x)))
    model = BarlowModel(keras.Model(inputs, layers.Dense(6)(x)))
    model.compile(optimizer=keras.optimizers.Adam(1e-3), loss=BarlowLoss(BATCH))
    views = [tf.data.Dataset.from_tensor_slices(images(8, 3, seed=seed)) for seed in (0, 1)]
    return Training(model=model, x=tf.data.Dataset.zip(tuple(views)).batch(BATCH))


def simsiam():
    """SimSiam (SyncBatchNormalization): a stopped gradient, a negative cosine similarity by `tf.math.l2_normalize`."""

    class SimSiam(keras.Model):
        def __init__(self, encoder, predictor):
            super().__init__()
            self.encoder = encoder
            self.predictor = predictor
            self.loss_tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_tracker]

        def train_step(self, data):
            ds_one, ds_two = data
            with tf.GradientTape() as tape:
                z1, z2 = self.encoder(ds_one), self.encoder(ds_two)
                p1, p2 = self.predictor(z1), self.predictor(z2)
                loss = compute_loss(p1, z2) / 2 + compute_loss(p2, z1) / 2
            learnable_params = self.encoder.trainable_variables + self.predictor.trainable_variables
            gradients = tape.gradient(loss, learnable_params)
            self.optimizer.apply_gradients(zip(gradients, learnable_params, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    def compute_loss(p, z):
        z = tf.stop_gradient(z)
        p = tf.math.l2_normalize(p, axis=1)
        z = tf.math.l2_normalize(z, axis=1)
        return -tf.reduce_mean(tf.reduce_sum((p * z), axis=1))

    encoder = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, 2), layers.Flatten(), layers.Dense(6), batch_normalization()]
    )
    predictor = keras.Sequential([keras.Input((6,)), layers.Dense(3, activation="relu"), layers.Dense(6)])
    model = SimSiam(encoder, predictor)
    steps = keras.optimizers.schedules.CosineDecay(0.03, 8)
    model.compile(optimizer=keras.optimizers.SGD(steps, momentum=0.6))
    views = [tf.data.Dataset.from_tensor_slices(images(8, 3, seed=seed)) for seed in (0, 1)]
    return Training(model=model, x=tf.data.Dataset.zip(tuple(views)).batch(BATCH))


def nnclr():
    """NNCLR: a queue of features as a weight, nearest neighbours in it, correlations of the batch."""

    class NNCLR(keras.Model):
        def __init__(self, temperature=0.1, queue_size=20, width=6):
            super().__init__()
            self.probe_accuracy = keras.metrics.SparseCategoricalAccuracy(name="p_acc")
            self.correlation_accuracy = keras.metrics.SparseCategoricalAccuracy(name="r_acc")
            self.contrastive_accuracy = keras.metrics.SparseCategoricalAccuracy(name="c_acc")
            self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.encoder = keras.Sequential(
                [keras.Input((8, 8, 3)), layers.Conv2D(4, 3, 2, activation="relu"), layers.Flatten(), layers.Dense(6)]
            )
            self.projection_head = keras.Sequential([keras.Input((6,)), layers.Dense(width)])
            self.linear_probe = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
            self.temperature = temperature
            self.feature_queue = self.add_weight(
                name="feature_queue", shape=(queue_size, width), initializer="random_normal", trainable=False
            )
            self.feature_queue.assign(tf.math.l2_normalize(self.feature_queue.value, axis=1))

        def compile(self, contrastive_optimizer, probe_optimizer, **kwargs):
            super().compile(**kwargs)
            self.contrastive_optimizer = contrastive_optimizer
            self.probe_optimizer = probe_optimizer

        def nearest_neighbour(self, projections):
            support_similarities = ops.matmul(projections, ops.transpose(self.feature_queue))
            nn_projections = ops.take(self.feature_queue, ops.argmax(support_similarities, axis=1), axis=0)
            return projections + ops.stop_gradient(nn_projections - projections)

        def update_contrastive_accuracy(self, features_1, features_2):
            features_1, features_2 = ops.normalize(features_1, axis=1), ops.normalize(features_2, axis=1)
            similarities = ops.matmul(features_1, ops.transpose(features_2))
            contrastive_labels = ops.arange(ops.shape(features_1)[0])
            self.contrastive_accuracy.update_state(
                ops.concatenate([contrastive_labels, contrastive_labels], axis=0),
                ops.concatenate([similarities, ops.transpose(similarities)], axis=0),
            )

        def update_correlation_accuracy(self, features_1, features_2):
            features_1 = (features_1 - ops.mean(features_1, axis=0)) / ops.std(features_1, axis=0)
            features_2 = (features_2 - ops.mean(features_2, axis=0)) / ops.std(features_2, axis=0)
            batch_size = ops.shape(features_1)[0]
            cross_correlation = ops.matmul(ops.transpose(features_1), features_2) / ops.cast(batch_size, "float64")
            feature_dim = ops.shape(features_1)[1]
            correlation_labels = ops.arange(feature_dim)
            self.correlation_accuracy.update_state(
                ops.concatenate([correlation_labels, correlation_labels], axis=0),
                ops.concatenate([cross_correlation, ops.transpose(cross_correlation)], axis=0),
            )

        def contrastive_loss(self, projections_1, projections_2):
            projections_1 = ops.normalize(projections_1, axis=1)
            projections_2 = ops.normalize(projections_2, axis=1)
            similarities_1_2 = (
                ops.matmul(self.nearest_neighbour(projections_1), ops.transpose(projections_2)) / self.temperature
            )
            similarities_2_1 = (
                ops.matmul(self.nearest_neighbour(projections_2), ops.transpose(projections_1)) / self.temperature
            )
            batch_size = ops.shape(projections_1)[0]
            contrastive_labels = ops.arange(batch_size)
            loss = keras.losses.sparse_categorical_crossentropy(
                ops.concatenate([contrastive_labels, contrastive_labels], axis=0),
                ops.concatenate([similarities_1_2, similarities_2_1], axis=0),
                from_logits=True,
            )
            self.feature_queue.assign(ops.concatenate([projections_1, self.feature_queue[:-batch_size]], axis=0))
            return loss

        def train_step(self, data):
            views, (labeled_images, labels) = data
            augmented_images_1, augmented_images_2 = views
            with tf.GradientTape() as tape:
                features_1, features_2 = self.encoder(augmented_images_1), self.encoder(augmented_images_2)
                projections_1, projections_2 = self.projection_head(features_1), self.projection_head(features_2)
                contrastive_loss = self.contrastive_loss(projections_1, projections_2)
            weights = self.encoder.trainable_weights + self.projection_head.trainable_weights
            self.contrastive_optimizer.apply(tape.gradient(contrastive_loss, weights), weights)
            self.update_contrastive_accuracy(features_1, features_2)
            self.update_correlation_accuracy(features_1, features_2)
            with tf.GradientTape() as tape:
                class_logits = self.linear_probe(self.encoder(labeled_images))
                probe_loss = self.probe_loss(labels, class_logits)
            weights = self.linear_probe.trainable_weights
            self.probe_optimizer.apply(tape.gradient(probe_loss, weights), weights)
            self.probe_accuracy.update_state(labels, class_logits)
            return {
                "c_loss": contrastive_loss,
                "c_acc": self.contrastive_accuracy.result(),
                "r_acc": self.correlation_accuracy.result(),
                "p_loss": probe_loss,
                "p_acc": self.probe_accuracy.result(),
            }

    model = NNCLR()
    model.compile(contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam())
    views = (images(8, 3)[:24], images(8, 3, seed=4)[:24])
    data = tf.data.Dataset.from_tensor_slices((views, (images(8, 3, seed=3)[:24], classes(3)[:24]))).batch(8)
    return Training(model=model, x=data)


def momentum_contrast():
    """Momentum contrast: a slow copy of the encoder, a queue of keys, cross-entropy of the first against it."""

    def encoder():
        return keras.Sequential([keras.Input((6,)), layers.Dense(8, activation="relu"), layers.Dense(4)])

    class MoCo(keras.Model):
        def __init__(self, queue_size=16, momentum=0.9):
            super().__init__()
            self.encoder_q, self.encoder_k = encoder(), encoder()
            self.encoder_k.set_weights(self.encoder_q.get_weights())
            self.encoder_k.trainable = False
            self.momentum = momentum
            self.queue = self.add_weight(shape=(queue_size, 4), initializer="random_normal", trainable=False)
            self.pointer = self.add_weight(shape=(), initializer="zeros", trainable=False, dtype="int32")
            self.seeds = keras.random.SeedGenerator(4)
            self.loss_tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_tracker]

        def train_step(self, x):
            im_q = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.seeds)
            im_k = x + 0.1 * keras.random.normal(tf.shape(x), seed=self.seeds)
            k = tf.math.l2_normalize(self.encoder_k(im_k), axis=1)
            with tf.GradientTape() as tape:
                q = tf.math.l2_normalize(self.encoder_q(im_q), axis=1)
                l_pos = tf.expand_dims(tf.einsum("nc,nc->n", q, k), -1)
                l_neg = tf.einsum("nc,kc->nk", q, tf.stop_gradient(self.queue.value))
                logits = tf.concat([l_pos, l_neg], axis=1) / 0.2
                labels = tf.zeros(tf.shape(logits)[0], dtype=tf.int64)
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            variables = self.encoder_q.trainable_variables
            self.optimizer.apply(tape.gradient(loss, variables), variables)
            for slow, fast in zip(self.encoder_k.weights, self.encoder_q.weights, strict=True):
                slow.assign(self.momentum * slow + (1 - self.momentum) * fast)
            count, size = tf.shape(k)[0], tf.shape(self.queue.value)[0]
            places = (self.pointer.value + tf.range(count)) % size
            self.queue.assign(tf.tensor_scatter_nd_update(self.queue.value, places[:, None], k))
            self.pointer.assign((self.pointer.value + count) % size)
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    model = MoCo()
    model.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9))
    return Training(model=model, x=numbers(6))


EXAMPLES = (
    simclr,
    supervised_contrastive,
    siamese_triplet,
    siamese_contrastive,
    metric_learning,
    barlow_twins,
    simsiam,
    nnclr,
    momentum_contrast,
)
