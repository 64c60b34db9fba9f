"""A subclass whose layers are made when it is called, with a train_step of its own."""

import argparse

import horovod.tensorflow.keras as hvd
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=10)
args = parser.parse_args()

hvd.init()

(images, labels), _ = tf.keras.datasets.mnist.load_data("mnist-%d.npz" % hvd.rank())
dataset = tf.data.Dataset.from_tensor_slices((images.astype("float32") / 255.0, labels.astype("int64")))
dataset = dataset.shard(hvd.size(), hvd.rank()).batch(32)


class Classifier(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten = tf.keras.layers.Flatten()
        self.hidden = tf.keras.layers.Dense(16, activation="relu")
        self.out = tf.keras.layers.Dense(10)
        self.loss_tracker = tf.keras.metrics.Mean(name="loss")

    def call(self, images, training=False):
        return self.out(self.hidden(self.flatten(images)))

    @property
    def metrics(self):
        return [self.loss_tracker]

    def train_step(self, data):
        images, labels = data
        with tf.GradientTape() as tape:
            logits = self(images, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables))
        self.loss_tracker.update_state(loss)
        return {"loss": self.loss_tracker.result()}


model = Classifier()
model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.legacy.Adam(0.001 * hvd.size())))
history = model.fit(
    dataset,
    epochs=args.epochs,
    verbose=0,
    callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()],
)
