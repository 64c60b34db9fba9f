"""Examples with structured data and time series, and recommender systems."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, SAMPLES, Training, batch_normalization, classes, numbers, tokens


def collaborative_filtering():
    """Collaborative filtering: a model whose `call` multiplies the batch's embeddings by `tensordot`."""

    class RecommenderNet(keras.Model):
        def __init__(self, num_users, num_movies, embedding_size, **kwargs):
            super().__init__(**kwargs)
            options = {"embeddings_initializer": "he_normal", "embeddings_regularizer": keras.regularizers.l2(1e-3)}
            self.user_embedding = layers.Embedding(num_users, embedding_size, **options)
            self.user_bias = layers.Embedding(num_users, 1)
            self.movie_embedding = layers.Embedding(num_movies, embedding_size, **options)
            self.movie_bias = layers.Embedding(num_movies, 1)

        def call(self, inputs):
            user_vector = self.user_embedding(inputs[:, 0])
            user_bias = self.user_bias(inputs[:, 0])
            movie_vector = self.movie_embedding(inputs[:, 1])
            movie_bias = self.movie_bias(inputs[:, 1])
            dot_user_movie = ops.tensordot(user_vector, movie_vector, 2)
            x = dot_user_movie + user_bias + movie_bias
            return ops.nn.sigmoid(x)

    model = RecommenderNet(6, 9, 4)
    model.compile(loss=keras.losses.BinaryCrossentropy(), optimizer=keras.optimizers.Adam(learning_rate=0.001))
    pairs = np.stack([classes(6), classes(9, seed=4)], 1)
    x, y = pairs, np.random.default_rng(5).random(SAMPLES)
    return Training(model=model, x=x, y=y, fit={"validation_data": (x[:8], y[:8]), "validation_batch_size": 8})


def two_tower_retrieval():
    """Two-tower retrieval: `compute_loss` with negatives in the batch, and accidental hits."""

    class Retrieval(keras.Model):
        def __init__(self):
            super().__init__()
            self.user_model = keras.Sequential([layers.Embedding(6, 4), layers.Dense(4)])
            self.movie_model = keras.Sequential([layers.Embedding(9, 4), layers.Dense(4)])
            self.loss_fn = keras.losses.CategoricalCrossentropy(from_logits=True, reduction="sum")
            self.top = keras.metrics.CategoricalAccuracy(name="top")

        def call(self, features):
            return self.user_model(features["user_id"]), self.movie_model(features["movie_id"])

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            query, candidates = y_pred
            scores = ops.matmul(query, ops.transpose(candidates))
            count = ops.shape(scores)[0]
            labels = ops.eye(count, dtype=scores.dtype)
            scores = scores - ops.log(x["probability"])[None, :]
            same = ops.cast(ops.equal(x["movie_id"][:, None], x["movie_id"][None, :]), scores.dtype)
            scores = scores - 1e4 * (same - labels)
            self.top.update_state(labels, scores)
            return self.loss_fn(labels, scores)

    model = Retrieval()
    model.compile(optimizer=keras.optimizers.Adagrad(0.1))
    features = {"user_id": classes(6), "movie_id": classes(9, seed=4), "probability": 0.1 + classes(4, seed=6) / 9}
    return Training(model=model, x=tf.data.Dataset.from_tensor_slices(features).batch(BATCH))


def listwise_ranking():
    """Listwise ranking: ListMLE as a loss with sorting, and a pairwise hinge, of each sample's own list."""

    def list_mle(y_true, y_pred):
        order = ops.argsort(-y_true, axis=1)
        scores = ops.take_along_axis(y_pred, order, axis=1)
        scores = scores - ops.max(scores, axis=1, keepdims=True)
        sums = ops.flip(ops.cumsum(ops.flip(ops.exp(scores), axis=1), axis=1), axis=1)
        return ops.sum(ops.log(sums) - scores, axis=1)

    def loss(y_true, y_pred):
        pairs = y_pred[:, :, None] - y_pred[:, None, :]
        wanted = ops.cast(y_true[:, :, None] > y_true[:, None, :], pairs.dtype)
        hinge = ops.sum(wanted * ops.relu(1 - pairs)) / ops.maximum(ops.sum(wanted), 1.0)
        return ops.mean(list_mle(y_true, y_pred)) + 0.1 * hinge

    inputs = keras.Input((5, 3))
    hidden = layers.Dense(6, activation="relu")(inputs)
    model = keras.Model(inputs, layers.Reshape((5,))(layers.Dense(1)(hidden)))
    model.compile(keras.optimizers.Adagrad(0.1), loss)
    return Training(model=model, x=numbers(5, 3), y=classes(5, 5).astype("float64"))


def deep_and_cross():
    """Deep and cross network: a cross layer."""

    class Cross(layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(input_shape[0][-1],) * 2, initializer="glorot_uniform", name="kernel")
            self.bias = self.add_weight(shape=(input_shape[0][-1],), initializer="zeros", name="bias")

        def call(self, inputs):
            x0, x = inputs
            return x0 * (ops.matmul(x, self.kernel) + self.bias) + x

    inputs = {name: keras.Input((), name=name, dtype="int64") for name in ("user", "movie")}
    encoded = [layers.Embedding(9, 4)(each) for each in inputs.values()]
    x0 = layers.concatenate(encoded)
    cross = Cross()([x0, Cross()([x0, x0])])
    deep = layers.Dropout(0.2)(layers.ReLU()(layers.Dense(6)(x0)))
    model = keras.Model(inputs, layers.Dense(3, activation="softmax")(layers.concatenate([cross, deep])))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return Training(model=model, x={"user": classes(9), "movie": classes(9, seed=3)}, y=classes(3))


def gated_residual_network():
    """Gated residual and variable selection networks: layers of gates, stacked features and soft selections."""

    class GatedLinearUnit(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.linear = layers.Dense(units)
            self.sigmoid = layers.Dense(units, activation="sigmoid")

        def call(self, inputs):
            return self.linear(inputs) * self.sigmoid(inputs)

    class GatedResidualNetwork(layers.Layer):
        def __init__(self, units, dropout_rate):
            super().__init__()
            self.units = units
            self.elu_dense = layers.Dense(units, activation="elu")
            self.linear_dense = layers.Dense(units)
            self.dropout = layers.Dropout(dropout_rate)
            self.gated_linear_unit = GatedLinearUnit(units)
            self.layer_norm = layers.LayerNormalization()
            self.project = layers.Dense(units)

        def call(self, inputs):
            x = self.dropout(self.linear_dense(self.elu_dense(inputs)))
            if inputs.shape[-1] != self.units:
                inputs = self.project(inputs)
            return self.layer_norm(inputs + self.gated_linear_unit(x))

    class VariableSelection(layers.Layer):
        def __init__(self, num_features, units, dropout_rate):
            super().__init__()
            self.grns = [GatedResidualNetwork(units, dropout_rate) for _ in range(num_features)]
            self.grn_concat = GatedResidualNetwork(units, dropout_rate)
            self.softmax = layers.Dense(units=num_features, activation="softmax")

        def call(self, inputs):
            v = self.grn_concat(layers.concatenate(inputs))
            v = ops.expand_dims(self.softmax(v), axis=-1)
            x = ops.stack([grn(each) for grn, each in zip(self.grns, inputs, strict=True)], axis=1)
            return ops.squeeze(ops.matmul(ops.transpose(v, axes=[0, 2, 1]), x), axis=1)

    inputs = [keras.Input((1,)), keras.Input((1,)), keras.Input((), dtype="int64")]
    features = [layers.Dense(4)(inputs[0]), layers.Dense(4)(inputs[1]), layers.Embedding(5, 4)(inputs[2])]
    x = VariableSelection(3, 4, 0.15)(features)
    model = keras.Model(inputs, layers.Dense(1, activation="sigmoid")(x))
    model.compile("adam", keras.losses.BinaryCrossentropy(), metrics=[keras.metrics.BinaryAccuracy(name="accuracy")])
    return Training(model=model, x=[numbers(1), numbers(1, seed=3), classes(5)], y=classes(2, 1).astype("float64"))


def neural_decision_forest():
    """Neural decision forest (SyncBatchNormalization): models that route by shapes of the batch."""

    class NeuralDecisionTree(keras.Model):
        def __init__(self, depth, num_features, used_features_rate, num_classes):
            super().__init__()
            self.depth = depth
            self.num_leaves = 2**depth
            self.num_classes = num_classes
            num_used_features = int(num_features * used_features_rate)
            one_hot = np.eye(num_features)
            sampled = np.random.default_rng(0).choice(np.arange(num_features), num_used_features, replace=False)
            self.used_features_mask = ops.convert_to_tensor(one_hot[sampled])
            self.pi = self.add_weight(
                initializer="random_normal", shape=[self.num_leaves, self.num_classes], trainable=True
            )
            self.decision_fn = layers.Dense(units=self.num_leaves, activation="sigmoid", name="decision")

        def call(self, features):
            batch_size = ops.shape(features)[0]
            features = ops.matmul(features, ops.transpose(self.used_features_mask))
            decisions = ops.expand_dims(self.decision_fn(features), axis=2)
            decisions = layers.concatenate([decisions, 1 - decisions], axis=2)
            mu = ops.ones([batch_size, 1, 1])
            begin_idx, end_idx = 1, 2
            for level in range(self.depth):
                mu = ops.reshape(mu, [batch_size, -1, 1])
                mu = ops.tile(mu, (1, 1, 2))
                level_decisions = decisions[:, begin_idx:end_idx, :]
                mu = mu * level_decisions
                begin_idx = end_idx
                end_idx = begin_idx + 2 ** (level + 1)
            mu = ops.reshape(mu, [batch_size, self.num_leaves])
            probabilities = keras.activations.softmax(self.pi)
            return ops.matmul(mu, probabilities)

    class NeuralDecisionForest(keras.Model):
        def __init__(self, num_trees, depth, num_features, used_features_rate, num_classes):
            super().__init__()
            self.ensemble = [
                NeuralDecisionTree(depth, num_features, used_features_rate, num_classes) for _ in range(num_trees)
            ]
            self.num_classes = num_classes

        def call(self, inputs):
            batch_size = ops.shape(inputs)[0]
            outputs = ops.zeros([batch_size, self.num_classes])
            for tree in self.ensemble:
                outputs += tree(inputs)
            outputs /= len(self.ensemble)
            return outputs

    inputs = keras.Input((6,))
    outputs = NeuralDecisionForest(2, 3, 6, 0.6, 3)(batch_normalization()(inputs))
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(), metrics=["accuracy"])
    return Training(model=model, x=numbers(6), y=classes(3))


def bayesian_network():
    """Bayesian network (Bayes by backprop): layers that draw their weights, `add_loss` of a divergence."""

    class DenseVariational(layers.Layer):
        def __init__(self, units, kl_weight, activation=None, **kwargs):
            super().__init__(**kwargs)
            self.units = units
            self.kl_weight = kl_weight
            self.activation = keras.activations.get(activation)
            self.seeds = keras.random.SeedGenerator(11)

        def build(self, input_shape):
            shape = (input_shape[-1], self.units)
            self.kernel_mu = self.add_weight(name="kernel_mu", shape=shape, initializer="random_normal")
            self.kernel_rho = self.add_weight(name="kernel_rho", shape=shape, initializer="zeros")

        def call(self, inputs):
            kernel_sigma = ops.softplus(self.kernel_rho)
            noise = keras.random.normal(self.kernel_mu.shape, seed=self.seeds)
            kernel = self.kernel_mu + kernel_sigma * noise
            log_posterior = ops.sum(-0.5 * ops.square(noise) - ops.log(kernel_sigma))
            log_prior = ops.sum(-0.5 * ops.square(kernel))
            self.add_loss(self.kl_weight * (log_posterior - log_prior))
            return self.activation(ops.matmul(inputs, kernel))

    def neg_log_likelihood(y_obs, y_pred, sigma=1.0):
        return ops.sum(0.5 * ops.square((y_obs - y_pred) / sigma))

    inputs = keras.Input((3,))
    x = DenseVariational(6, 0.1, activation="relu")(inputs)
    model = keras.Model(inputs, DenseVariational(1, 0.1)(x))
    model.compile(loss=neg_log_likelihood, optimizer=keras.optimizers.Adam(learning_rate=0.03), metrics=["mse"])
    return Training(model=model, x=numbers(3), y=numbers(1, seed=4))


def center_loss():
    """Center loss and focal loss: centers as a weight that the step moves by the batch's counts, an own loss class."""

    class FocalLoss(keras.losses.Loss):
        def __init__(self, gamma=2.0, alpha=0.25, **kwargs):
            super().__init__(**kwargs)
            self.gamma, self.alpha = gamma, alpha

        def call(self, y_true, y_pred):
            cross_entropy = tf.nn.sigmoid_cross_entropy_with_logits(labels=y_true, logits=y_pred)
            probs = tf.nn.sigmoid(y_pred)
            alpha = self.alpha * y_true + (1.0 - self.alpha) * (1.0 - y_true)
            pt = tf.where(tf.equal(y_true, 1.0), probs, 1 - probs)
            normalizer = tf.maximum(tf.reduce_sum(y_true), 1.0)
            return tf.reduce_sum(alpha * tf.pow(1.0 - pt, self.gamma) * cross_entropy, axis=-1) / normalizer

    class CenterLossModel(keras.Model):
        def __init__(self, num_classes=3, dim=4):
            super().__init__()
            self.features = keras.Sequential([layers.Dense(8, activation="relu"), layers.Dense(dim)])
            self.head = layers.Dense(num_classes)
            self.centers = self.add_weight(shape=(num_classes, dim), initializer="zeros", trainable=False)

        def call(self, x):
            features = self.features(x)
            return self.head(features), features

        def train_step(self, data):
            x, y = data
            labels = tf.argmax(y, axis=1)
            with tf.GradientTape() as tape:
                logits, features = self(x, training=True)
                centers = tf.gather(self.centers.value, labels)
                pull = tf.nn.l2_loss(features - centers)
                loss = self.loss(y, logits) + 0.01 * pull
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            unique, places, counts = tf.unique_with_counts(labels)
            appearances = tf.cast(tf.gather(counts, places), features.dtype)[:, None]
            moves = 0.5 * (centers - features) / (1.0 + appearances)
            self.centers.assign(tf.tensor_scatter_nd_sub(self.centers.value, labels[:, None], moves))
            return {"loss": loss, "pull": pull, "classes": tf.size(unique)}

    model = CenterLossModel()
    model.compile(optimizer=keras.optimizers.Adam(0.01), loss=FocalLoss(reduction="sum"))
    return Training(model=model, x=numbers(6), y=np.eye(3)[classes(3)])


def traffic_graph_forecasting():
    """Traffic forecasting with graph convolution and an LSTM: a layer that reads neighbours of a fixed graph."""

    edges = (np.array([0, 1, 2, 3, 0]), np.array([1, 2, 3, 0, 2]))

    class GraphConv(layers.Layer):
        def __init__(self, in_feat, out_feat, **kwargs):
            super().__init__(**kwargs)
            self.out_feat = out_feat
            self.weight = self.add_weight(initializer="glorot_uniform", shape=(in_feat, out_feat), trainable=True)

        def call(self, features):
            nodes_representation = ops.matmul(features, self.weight)
            neighbour_representations = ops.take(features, edges[1], axis=0)
            aggregated = ops.segment_sum(neighbour_representations, edges[0], num_segments=4)
            counts = ops.segment_sum(ops.ones_like(neighbour_representations[..., :1]), edges[0], num_segments=4)
            aggregated_messages = ops.matmul(aggregated / ops.maximum(counts, 1.0), self.weight)
            return ops.relu(ops.concatenate([nodes_representation, aggregated_messages], axis=-1))

    class LSTMGC(layers.Layer):
        def __init__(self, in_feat, out_feat, lstm_units, output_seq_len, **kwargs):
            super().__init__(**kwargs)
            self.graph_conv = GraphConv(in_feat, out_feat)
            self.lstm = layers.LSTM(lstm_units, activation="relu")
            self.dense = layers.Dense(output_seq_len)

        def call(self, inputs):
            inputs = ops.transpose(inputs, [2, 0, 1, 3])
            gcn_out = self.graph_conv(inputs)
            shape = ops.shape(gcn_out)
            num_nodes, batch_size = shape[0], shape[1]
            input_seq_len, out_feat = shape[2], shape[3]
            gcn_out = ops.reshape(gcn_out, (batch_size * num_nodes, input_seq_len, out_feat))
            dense_output = self.dense(self.lstm(gcn_out))
            output = ops.reshape(dense_output, (num_nodes, batch_size, -1))
            return ops.transpose(output, [1, 2, 0])

    inputs = layers.Input((5, 4, 1))
    model = keras.Model(inputs, LSTMGC(1, 3, 4, 2)(inputs))
    model.compile(optimizer=keras.optimizers.RMSprop(learning_rate=0.0002), loss=keras.losses.MeanSquaredError())
    return Training(model=model, x=numbers(5, 4, 1), y=numbers(2, 4, seed=7))


def behavior_sequence_transformer():
    """Behavior sequence transformer: multiplies, stacks and casts by operations in a Functional model."""

    sequence, target = keras.Input((4,), dtype="int64", name="sequence"), keras.Input((), dtype="int64", name="target")
    ratings = keras.Input((4,), name="ratings")
    table = layers.Embedding(11, 5)
    encoded = table(sequence) + layers.Embedding(4, 5)(ops.arange(4))
    encoded = encoded * ops.expand_dims(ratings, -1)
    features = ops.concatenate([encoded, ops.expand_dims(table(target), 1)], axis=1)
    # Without dropout: nothing in it puts samples together, so that each rank would draw its own.
    attention = layers.Dropout(0.0)(layers.MultiHeadAttention(2, 5, dropout=0.0)(features, features))
    x = layers.LayerNormalization()(layers.Add()([features, attention]))
    x = layers.Dropout(0.0)(layers.LeakyReLU()(layers.Dense(6)(layers.Flatten()(x))))
    model = keras.Model([sequence, target, ratings], layers.Dense(1)(x))
    model.compile(
        keras.optimizers.Adagrad(0.01), keras.losses.MeanSquaredError(), metrics=[keras.metrics.MeanAbsoluteError()]
    )
    inputs = {"sequence": tokens(4), "target": classes(11), "ratings": numbers(4)}
    return Training(model=model, x=inputs, y=numbers(1, seed=5))


EXAMPLES = (
    collaborative_filtering,
    two_tower_retrieval,
    listwise_ranking,
    deep_and_cross,
    gated_residual_network,
    neural_decision_forest,
    bayesian_network,
    center_loss,
    traffic_graph_forecasting,
    behavior_sequence_transformer,
)
