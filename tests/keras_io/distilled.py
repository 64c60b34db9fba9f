"""Examples whose targets are what a network says: distillation, consistency, domains, two encoders."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, Training, classes, images, tokens


def knowledge_distillation():
    """Knowledge distillation: a `compute_loss` with a frozen teacher and temperatures."""

    class Distiller(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.teacher = teacher
            self.student = student

        def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha=0.1, temperature=3):
            super().compile(optimizer=optimizer, metrics=metrics)
            self.student_loss_fn = student_loss_fn
            self.distillation_loss_fn = distillation_loss_fn
            self.alpha = alpha
            self.temperature = temperature

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):
            teacher_pred = self.teacher(x, training=False)
            student_loss = self.student_loss_fn(y, y_pred)
            distillation_loss = self.distillation_loss_fn(
                ops.softmax(teacher_pred / self.temperature, axis=1), ops.softmax(y_pred / self.temperature, axis=1)
            ) * (self.temperature**2)
            return self.alpha * student_loss + (1 - self.alpha) * distillation_loss

        def call(self, x):
            return self.student(x)

    def network(width):
        return keras.Sequential(
            [
                keras.Input((8, 8, 1)),
                layers.Conv2D(width, 3, strides=2, padding="same"),
                layers.LeakyReLU(negative_slope=0.2),
                layers.MaxPooling2D(2, strides=1, padding="same"),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )

    distiller = Distiller(student=network(2), teacher=network(4))
    distiller.teacher.trainable = False
    distiller.compile(
        optimizer=keras.optimizers.Adam(),
        metrics=[keras.metrics.SparseCategoricalAccuracy()],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        alpha=0.1,
        temperature=10,
    )
    return Training(model=distiller, x=images(8), y=classes(3))


def consistency_training():
    """Consistency training: a teacher's predictions as targets in `train_step`."""

    class SelfTrainer(keras.Model):
        def __init__(self, student, teacher):
            super().__init__()
            self.student = student
            self.teacher = teacher
            self.teacher.trainable = False

        def compile(self, optimizer, metrics, student_loss_fn, distillation_loss_fn, temperature=3):
            super().compile(optimizer=optimizer, metrics=metrics)
            self.student_loss_fn = student_loss_fn
            self.distillation_loss_fn = distillation_loss_fn
            self.temperature = temperature

        def train_step(self, data):
            (clean_ds, noisy_ds), y_true = data
            teacher_predictions = self.teacher(clean_ds, training=False)
            with tf.GradientTape() as tape:
                student_predictions = self.student(noisy_ds, training=True)
                student_loss = self.student_loss_fn(y_true, student_predictions)
                distillation_loss = self.distillation_loss_fn(
                    ops.softmax(teacher_predictions / self.temperature, axis=-1),
                    ops.softmax(student_predictions / self.temperature, axis=-1),
                )
                total_loss = (student_loss + distillation_loss) / 2
            trainable_vars = self.student.trainable_variables
            gradients = tape.gradient(total_loss, trainable_vars)
            self.optimizer.apply_gradients(zip(gradients, trainable_vars, strict=True))
            self.compiled_metrics.update_state(y_true, ops.softmax(student_predictions, axis=-1))
            results = {m.name: m.result() for m in self.metrics}
            results.update({"total_loss": total_loss})
            return results

        def test_step(self, data):
            x, y = data
            y_prediction = self.student(x, training=False)
            self.compiled_metrics.update_state(y, ops.softmax(y_prediction, axis=-1))
            return {m.name: m.result() for m in self.metrics}

        def call(self, x):
            return self.student(x)

    def network():
        return keras.Sequential(
            [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dropout(0.3), layers.Dense(3)]
        )

    self_trainer = SelfTrainer(network(), network())
    self_trainer.compile(
        optimizer="adam",
        metrics=["accuracy"],
        student_loss_fn=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        distillation_loss_fn=keras.losses.KLDivergence(),
        temperature=10,
    )
    data = tf.data.Dataset.from_tensor_slices(((images(8, 3), images(8, 3, seed=3)), classes(3))).batch(BATCH)
    return Training(model=self_trainer, x=data)


def adamatch():
    """AdaMatch: four datasets in one step, random interpolation of logits, thresholds by the batch, masks."""

    num_classes = 3

    def compute_loss_source(labels, logits_weak, logits_strong):
        loss_func = keras.losses.CategoricalCrossentropy(from_logits=True)
        return loss_func(labels, logits_weak) + loss_func(labels, logits_strong)

    def compute_loss_target(labels, logits, mask):
        loss_func = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="none")
        labels = tf.stop_gradient(labels)
        loss = loss_func(labels, logits)
        return tf.reduce_mean(loss * mask)

    class AdaMatch(keras.Model):
        def __init__(self, model, total_steps, tau=0.5):
            super().__init__()
            self.model = model
            self.tau = tau
            self.loss_tracker = keras.metrics.Mean(name="loss")
            self.total_steps = total_steps
            self.current_step = tf.Variable(0, dtype="int64")
            self.seeds = keras.random.SeedGenerator(3)

        @property
        def metrics(self):
            return [self.loss_tracker]

        def compute_mu(self):
            pi = tf.constant(np.pi, dtype="float64")
            step = tf.cast(self.current_step, dtype="float64")
            return 0.5 - tf.cos(tf.math.minimum(pi, (2 * pi * step) / self.total_steps)) / 2

        def train_step(self, data):
            (source_w, source_s, source_labels), (target_w, target_s) = data
            combined_images = tf.concat([source_w, source_s, target_w, target_s], 0)
            combined_source = tf.concat([source_w, source_s], 0)
            total_source = tf.shape(combined_source)[0]
            total_target = tf.shape(tf.concat([target_w, target_s], 0))[0]
            with tf.GradientTape() as tape:
                combined_logits = self.model(combined_images, training=True)
                z_d_prime_source = self.model(combined_source, training=False)
                z_prime_source = combined_logits[:total_source]
                lambd = keras.random.uniform((total_source, num_classes), 0, 1, seed=self.seeds)
                final_source_logits = (lambd * z_prime_source) + ((1 - lambd) * z_d_prime_source)
                y_hat_source_w = tf.nn.softmax(final_source_logits[: tf.shape(source_w)[0]])
                logits_target = combined_logits[total_source:]
                logits_target_weak = logits_target[: tf.shape(target_w)[0]]
                y_hat_target_w = tf.nn.softmax(logits_target_weak)
                expectation_ratio = tf.reduce_mean(y_hat_source_w) / tf.reduce_mean(y_hat_target_w)
                y_tilde_target_w = tf.math.l2_normalize(y_hat_target_w * expectation_ratio, 1)
                row_wise_max = tf.reduce_max(y_hat_source_w, axis=-1)
                final_sum = tf.reduce_mean(row_wise_max, 0)
                c_tau = self.tau * final_sum
                mask = tf.cast(tf.reduce_max(y_tilde_target_w, axis=-1) >= c_tau, "float64")
                source_loss = compute_loss_source(
                    source_labels,
                    final_source_logits[: tf.shape(source_w)[0]],
                    final_source_logits[tf.shape(source_w)[0] :],
                )
                target_loss = compute_loss_target(y_tilde_target_w, logits_target[tf.shape(target_w)[0] :], mask)
                t = self.compute_mu()
                total_loss = source_loss + (t * target_loss)
                self.current_step.assign_add(tf.cast(total_target > 0, "int64"))
            gradients = tape.gradient(total_loss, self.model.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
            self.loss_tracker.update_state(total_loss)
            return {"loss": self.loss_tracker.result()}

    net = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.Flatten(), layers.Dropout(0.3), layers.Dense(3)]
    )
    model = AdaMatch(net, total_steps=8)
    model.compile(optimizer=keras.optimizers.Adam(0.01))
    labels = np.eye(num_classes)[classes(3)]
    source = (images(8, 3), images(8, 3, seed=2), labels)
    target = (images(8, 3, seed=5), images(8, 3, seed=6))
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices((source, target)).batch(BATCH))


def dual_encoder():
    """Dual encoder of images and text: soft targets from similarities within the batch."""

    class DualEncoder(keras.Model):
        def __init__(self, text_encoder, image_encoder, temperature=1.0, **kwargs):
            super().__init__(**kwargs)
            self.text_encoder = text_encoder
            self.image_encoder = image_encoder
            self.temperature = temperature
            self.loss_tracker = keras.metrics.Mean(name="loss")

        @property
        def metrics(self):
            return [self.loss_tracker]

        def call(self, features, training=False):
            caption_embeddings = self.text_encoder(features["caption"], training=training)
            image_embeddings = self.image_encoder(features["image"], training=training)
            return caption_embeddings, image_embeddings

        def compute_loss(self, caption_embeddings, image_embeddings):
            logits = tf.matmul(caption_embeddings, image_embeddings, transpose_b=True) / self.temperature
            images_similarity = tf.matmul(image_embeddings, image_embeddings, transpose_b=True)
            captions_similarity = tf.matmul(caption_embeddings, caption_embeddings, transpose_b=True)
            targets = keras.activations.softmax((captions_similarity + images_similarity) / (2 * self.temperature))
            captions_loss = keras.losses.categorical_crossentropy(y_true=targets, y_pred=logits, from_logits=True)
            images_loss = keras.losses.categorical_crossentropy(
                y_true=tf.transpose(targets), y_pred=tf.transpose(logits), from_logits=True
            )
            return (captions_loss + images_loss) / 2

        def train_step(self, features):
            with tf.GradientTape() as tape:
                caption_embeddings, image_embeddings = self(features, training=True)
                loss = self.compute_loss(caption_embeddings, image_embeddings)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

        def test_step(self, features):
            caption_embeddings, image_embeddings = self(features, training=False)
            loss = self.compute_loss(caption_embeddings, image_embeddings)
            self.loss_tracker.update_state(loss)
            return {"loss": self.loss_tracker.result()}

    def project(embeddings, dims):
        projected = layers.Dense(units=dims)(embeddings)
        x = layers.Dropout(0.1)(layers.Dense(dims)(layers.Activation("gelu")(projected)))
        return layers.LayerNormalization()(layers.Add()([projected, x]))

    image = keras.Input((8, 8, 3))
    caption = keras.Input((6,), dtype="int64")
    image_encoder = keras.Model(image, project(layers.Flatten()(layers.Conv2D(3, 3)(image)), 5))
    embedded = layers.GlobalAveragePooling1D()(layers.Embedding(11, 5)(caption))
    model = DualEncoder(keras.Model(caption, project(embedded, 5)), image_encoder, temperature=0.05)
    model.compile(optimizer=keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.001))
    features = {"image": images(8, 3), "caption": tokens()}
    data = tf.data.Dataset.from_tensor_slices(features)
    return Training(model=model, x=data.batch(BATCH), fit={"validation_data": data.take(8).batch(8)})


EXAMPLES = (
    knowledge_distillation,
    consistency_training,
    adamatch,
    dual_encoder,
)
