"""Examples with graphs, and reinforcement learning."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.keras_io.training import BATCH, EPOCHS, SAMPLES, Loop, Training, classes, numbers

NODES = SAMPLES
EDGES = np.random.default_rng(9).integers(0, NODES, (60, 2))


def graph_network():
    """Node classification with graph networks: a model that holds the graph, looks up nodes by the batch's numbers."""

    def feed_forward(units):
        return keras.Sequential([layers.Dropout(0.2), layers.Dense(units, activation="gelu")])

    class GraphConvLayer(layers.Layer):
        def __init__(self, units, combination_type="concat", normalize=True, **kwargs):
            super().__init__(**kwargs)
            self.normalize = normalize
            self.ffn_prepare = feed_forward(units)
            self.update_fn = feed_forward(units)

        def prepare(self, node_representations, weights=None):
            messages = self.ffn_prepare(node_representations)
            if weights is not None:
                messages = messages * tf.expand_dims(weights, -1)
            return messages

        def aggregate(self, node_indices, neighbour_messages, node_representations):
            num_nodes = node_representations.shape[0]
            return tf.math.unsorted_segment_sum(neighbour_messages, node_indices, num_segments=num_nodes)

        def call(self, inputs):
            node_representations, edges, edge_weights = inputs
            node_indices, neighbour_indices = edges[0], edges[1]
            neighbour_representations = tf.gather(node_representations, neighbour_indices)
            neighbour_messages = self.prepare(neighbour_representations, edge_weights)
            aggregated_messages = self.aggregate(node_indices, neighbour_messages, node_representations)
            node_embeddings = self.update_fn(tf.concat([node_representations, aggregated_messages], axis=1))
            if self.normalize:
                node_embeddings = tf.nn.l2_normalize(node_embeddings, axis=-1)
            return node_embeddings

    class GNNNodeClassifier(keras.Model):
        def __init__(self, graph_info, num_classes, hidden_units):
            super().__init__()
            node_features, edges, edge_weights = graph_info
            self.node_features = tf.constant(node_features)
            self.edges = tf.constant(edges)
            self.edge_weights = tf.constant(edge_weights / np.sum(edge_weights))
            self.preprocess = feed_forward(hidden_units)
            self.conv1 = GraphConvLayer(hidden_units, name="graph_conv1")
            self.conv2 = GraphConvLayer(hidden_units, name="graph_conv2")
            self.compute_logits = layers.Dense(units=num_classes, name="logits")

        def call(self, input_node_indices):
            x = self.preprocess(self.node_features)
            x = self.conv1((x, self.edges, self.edge_weights)) + x
            x = self.conv2((x, self.edges, self.edge_weights)) + x
            node_embeddings = tf.gather(x, input_node_indices)
            return self.compute_logits(node_embeddings)

    model = GNNNodeClassifier((numbers(5), EDGES.T, np.ones(len(EDGES))), 3, 4)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    model(np.arange(2))
    return Training(model=model, x=np.arange(NODES), y=classes(3))


def graph_attention():
    """Graph attention network: a `train_step` over the whole graph, of which the batch names nodes and their labels."""

    class GraphAttention(layers.Layer):
        def __init__(self, units, **kwargs):
            super().__init__(**kwargs)
            self.units = units

        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(input_shape[0][-1], self.units), name="kernel", trainable=True)
            self.kernel_attention = self.add_weight(shape=(self.units * 2, 1), name="kernel_attention", trainable=True)
            self.built = True

        def call(self, inputs):
            node_states, edges = inputs
            node_states_transformed = ops.matmul(node_states, self.kernel)
            node_states_expanded = ops.take(node_states_transformed, edges, axis=0)
            node_states_expanded = ops.reshape(node_states_expanded, (ops.shape(edges)[0], -1))
            attention_scores = ops.leaky_relu(ops.matmul(node_states_expanded, self.kernel_attention))
            attention_scores = ops.squeeze(attention_scores, -1)
            attention_scores = ops.exp(ops.clip(attention_scores, -2, 2))
            attention_scores_sum = ops.segment_sum(attention_scores, edges[:, 0], num_segments=NODES)
            attention_scores_sum = ops.take(attention_scores_sum, edges[:, 0])
            attention_scores_norm = attention_scores / attention_scores_sum
            node_states_neighbors = ops.take(node_states_transformed, edges[:, 1], axis=0)
            return ops.segment_sum(
                data=node_states_neighbors * attention_scores_norm[:, None],
                segment_ids=edges[:, 0],
                num_segments=ops.shape(node_states)[0],
            )

    class GraphAttentionNetwork(keras.Model):
        def __init__(self, node_states, edges, hidden_units, num_layers, output_dim, **kwargs):
            super().__init__(**kwargs)
            self.node_states = ops.convert_to_tensor(node_states)
            self.edges = ops.convert_to_tensor(edges)
            self.preprocess = layers.Dense(hidden_units, activation="relu")
            self.attention_layers = [GraphAttention(hidden_units) for _ in range(num_layers)]
            self.output_layer = layers.Dense(output_dim)

        def call(self, inputs):
            node_states, edges = inputs
            x = self.preprocess(node_states)
            for layer in self.attention_layers:
                x = layer([x, edges]) + x
            return self.output_layer(x)

        def train_step(self, data):
            indices, labels = data
            with tf.GradientTape() as tape:
                outputs = self([self.node_states, self.edges])
                loss = self.compute_loss(y=labels, y_pred=ops.take(outputs, indices, axis=0))
            grads = tape.gradient(loss, self.trainable_weights)
            self.optimizer.apply(grads, self.trainable_weights)
            for metric in self.metrics:
                if metric.name == "loss":
                    metric.update_state(loss)
                else:
                    metric.update_state(labels, ops.take(outputs, indices, axis=0))
            return {m.name: m.result() for m in self.metrics}

    model = GraphAttentionNetwork(numbers(5), EDGES.astype("int64"), 4, 2, 3)
    model([model.node_states, model.edges])
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.SGD(0.1, momentum=0.9),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc")],
    )
    return Training(model=model, x=np.arange(NODES), y=classes(3))


def whole_graph_features():
    """Graph convolution as one batch: nodes as samples, their features times an adjacency over all of them."""

    adjacency = np.eye(8) + (np.random.default_rng(3).random((8, 8)) < 0.3)

    class GraphConvolution(layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.dense = layers.Dense(units, use_bias=False)
            self.a_hat = tf.constant(adjacency / adjacency.sum(1, keepdims=True))

        def call(self, x):
            return tf.nn.relu(tf.matmul(self.a_hat, self.dense(x)))

    class GCN(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.drop = GraphConvolution(5), GraphConvolution(3), layers.Dropout(0.3)

        def call(self, x, training=False):
            return self.second(self.drop(self.first(x), training=training))

    def masked_softmax_cross_entropy(y_true, y_pred):
        mask = tf.cast(y_true[:, 0] >= 0, y_pred.dtype)
        mask /= tf.reduce_mean(mask)
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(tf.maximum(y_true[:, 0], 0), tf.int64), y_pred)
        return tf.reduce_mean(each * mask)

    model = GCN()
    model.compile(keras.optimizers.Adam(0.01), loss=masked_softmax_cross_entropy)
    labels = np.where(np.random.default_rng(4).random((24, 1)) < 0.4, -1, classes(3, 1)[:24])
    return Training(model=model, x=numbers(5)[:24], y=labels)


def node2vec():
    """Graph representation by node2vec: a dot product of looked-up embeddings, sample weights from a generator."""
    inputs = {name: layers.Input((), dtype="int32", name=name) for name in ("target", "context")}
    table = layers.Embedding(11, 4, embeddings_initializer="he_normal", embeddings_regularizer="l2", name="item")
    logits = layers.Dot(axes=1, normalize=False, name="dot_similarity")(list(map(table, inputs.values())))

    class Negatives(layers.Layer):
        def call(self, inputs):
            scores, context = inputs
            counts = ops.sum(ops.one_hot(context, 11), axis=0)
            return scores - 0.1 * ops.log1p(ops.take(counts, context, axis=0))[:, None]

    model = keras.Model(inputs=inputs, outputs=Negatives()([logits, inputs["context"]]))
    model.compile(keras.optimizers.SGD(0.1), keras.losses.BinaryCrossentropy(from_logits=True))
    pairs = {"target": classes(11).astype("int32"), "context": classes(11, seed=5).astype("int32")}
    weights = 0.5 + np.random.default_rng(6).random(SAMPLES)
    data = tf.data.Dataset.from_tensor_slices((pairs, classes(2, 1).astype("float64"), weights))
    return Training(model=model, x=data.batch(BATCH))


def molecular_wgan():
    """WGAN-GP with relational graph convolutions: adjacency and features, a penalty on both gradients, softmaxes."""

    atoms, bonds, kinds = 4, 3, 3

    class RelationalGraphConvLayer(layers.Layer):
        def __init__(self, units=5, **kwargs):
            super().__init__(**kwargs)
            self.units = units

        def build(self, input_shape):
            bond_dim, atom_dim = input_shape[0][1], input_shape[1][2]
            self.kernel = self.add_weight(shape=(bond_dim, atom_dim, self.units), name="W", trainable=True)

        def call(self, inputs, training=False):
            adjacency, features = inputs
            x = ops.matmul(adjacency, features[:, None])
            x = ops.matmul(x, self.kernel)
            return ops.tanh(ops.sum(x, axis=1))

    z = keras.Input((4,))
    x = layers.Dense(8, activation="tanh")(z)
    x_adjacency = layers.Reshape((bonds, atoms, atoms))(layers.Dense(bonds * atoms * atoms)(x))
    x_adjacency = (x_adjacency + ops.transpose(x_adjacency, (0, 1, 3, 2))) / 2
    x_features = layers.Softmax(axis=2)(layers.Reshape((atoms, kinds))(layers.Dense(atoms * kinds)(x)))
    generator = keras.Model(z, [layers.Softmax(axis=1)(x_adjacency), x_features], name="Generator")
    graph = [keras.Input((bonds, atoms, atoms)), keras.Input((atoms, kinds))]
    hidden = layers.GlobalAveragePooling1D()(RelationalGraphConvLayer()(graph))
    discriminator = keras.Model(graph, layers.Dense(1)(layers.Dropout(0.2)(hidden)))

    class GraphWGAN(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator, self.discriminator = generator, discriminator
            self.latent_dim = 4
            self.seeds = keras.random.SeedGenerator(5)

        def compile(self, optimizer_generator, optimizer_discriminator, **kwargs):
            super().compile(**kwargs)
            self.optimizer_generator = optimizer_generator
            self.optimizer_discriminator = optimizer_discriminator
            self.metric_generator = keras.metrics.Mean(name="loss_gen")
            self.metric_discriminator = keras.metrics.Mean(name="loss_dis")

        def train_step(self, inputs):
            if isinstance(inputs[0], tuple):
                inputs = inputs[0]
            graph_real = inputs
            self.batch_size = tf.shape(inputs[0])[0]
            z = keras.random.normal((self.batch_size, self.latent_dim), seed=self.seeds)
            graph_generated = self.generator(z, training=True)
            with tf.GradientTape() as tape:
                loss = self._loss_discriminator(graph_real, graph_generated)
            grads = tape.gradient(loss, self.discriminator.trainable_weights)
            self.optimizer_discriminator.apply(grads, self.discriminator.trainable_weights)
            self.metric_discriminator.update_state(loss)
            z = keras.random.normal((self.batch_size, self.latent_dim), seed=self.seeds)
            with tf.GradientTape() as tape:
                graph_generated = self.generator(z, training=True)
                loss = -tf.reduce_mean(self.discriminator(graph_generated, training=True))
            grads = tape.gradient(loss, self.generator.trainable_weights)
            self.optimizer_generator.apply(grads, self.generator.trainable_weights)
            self.metric_generator.update_state(loss)
            return {m.name: m.result() for m in self.metrics}

        def _loss_discriminator(self, graph_real, graph_generated):
            logits_real = self.discriminator(graph_real, training=True)
            logits_generated = self.discriminator(graph_generated, training=True)
            loss = tf.reduce_mean(logits_generated) - tf.reduce_mean(logits_real)
            return loss + self._gradient_penalty(graph_real, graph_generated) * 10

        def _gradient_penalty(self, graph_real, graph_generated):
            adjacency_real, features_real = graph_real
            adjacency_generated, features_generated = graph_generated
            alpha = keras.random.uniform([self.batch_size], seed=self.seeds)
            alpha = tf.reshape(alpha, (self.batch_size, 1, 1, 1))
            adjacency_interp = (adjacency_real * alpha) + (1 - alpha) * adjacency_generated
            alpha = tf.reshape(alpha, (self.batch_size, 1, 1))
            features_interp = (features_real * alpha) + (1 - alpha) * features_generated
            with tf.GradientTape() as tape:
                tape.watch(adjacency_interp)
                tape.watch(features_interp)
                logits = self.discriminator([adjacency_interp, features_interp], training=True)
            grads = tape.gradient(logits, [adjacency_interp, features_interp])
            grads_adjacency_penalty = (1 - tf.norm(grads[0], axis=1)) ** 2
            grads_features_penalty = (1 - tf.norm(grads[1], axis=2)) ** 2
            return tf.reduce_mean(
                tf.reduce_mean(grads_adjacency_penalty, axis=(-2, -1))
                + tf.reduce_mean(grads_features_penalty, axis=(-1))
            )

    model = GraphWGAN()
    model.compile(keras.optimizers.Adam(5e-4), keras.optimizers.Adam(5e-4))
    adjacency = np.moveaxis(np.eye(bonds)[classes(bonds, atoms, atoms)], -1, 1)
    return Training(model=model, x=[adjacency, np.eye(kinds)[classes(kinds, atoms)]])


class Walk:
    """An environment of a few numbers, alike for all ranks."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def reset(self):
        self.state = self.rng.standard_normal(4)
        return self.state

    def step(self, action):
        self.state = 0.9 * self.state + 0.1 * self.rng.standard_normal(4) + 0.1 * np.sum(action)
        return self.state, float(-np.sum(self.state**2)), False


def deep_q_network():
    """Deep Q-learning: a replay buffer, a target network, a step with masks of actions and a Huber loss."""

    def run(steps):
        def create_q_model():
            return keras.Sequential([keras.Input((4,)), layers.Dense(8, activation="relu"), layers.Dense(2)])

        model, model_target = create_q_model(), create_q_model()
        optimizer = keras.optimizers.Adam(learning_rate=0.01, clipnorm=1.0)
        optimizer.build(model.trainable_variables)
        loss_function = keras.losses.Huber()

        @steps.compiled
        def update(states, next_states, actions, rewards, done):
            future_rewards = model_target(next_states)
            updated_q_values = rewards + 0.9 * tf.reduce_max(future_rewards, axis=1)
            updated_q_values = updated_q_values * (1 - done) - done
            masks = tf.one_hot(actions, 2, dtype=tf.float64)
            with tf.GradientTape() as tape:
                q_values = model(states)
                q_action = tf.reduce_sum(tf.multiply(q_values, masks), axis=1)
                loss = loss_function(updated_q_values, q_action)
            grads = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        env, rng, history, buffer = Walk(1), np.random.default_rng(2), {"loss": []}, []
        state = env.reset()
        for frame in range(40):
            explores = rng.random() < 0.3
            action = int(rng.integers(2)) if explores else int(np.argmax(model(state[None])[0]))
            state_next, reward, done = env.step(action - 0.5)
            buffer.append((state, state_next, action, reward, float(done)))
            state = state_next
            if len(buffer) > BATCH and frame % 4 == 0:
                picked = [buffer[each] for each in rng.integers(0, len(buffer), BATCH)]
                history["loss"].append(
                    float(update(*steps.mine(*(np.array(each) for each in zip(*picked, strict=True)))))
                )
            if frame % 10 == 0:
                model_target.set_weights(model.get_weights())
        return model.get_weights(), history

    return Loop(run)


def deep_deterministic_policy_gradient():
    """DDPG: two networks and their slow targets, two tapes in one step, moves of targets by `assign`."""

    def run(steps):
        def actor():
            return keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="relu"), layers.Dense(1, "tanh")])

        def critic():
            state, action = keras.Input((4,)), keras.Input((1,))
            x = layers.Dense(6, activation="relu")(layers.Concatenate()([state, action]))
            return keras.Model([state, action], layers.Dense(1)(x))

        actor_model, target_actor, critic_model, target_critic = actor(), actor(), critic(), critic()
        target_actor.set_weights(actor_model.get_weights())
        target_critic.set_weights(critic_model.get_weights())
        critic_optimizer, actor_optimizer = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.01)
        critic_optimizer.build(critic_model.trainable_variables)
        actor_optimizer.build(actor_model.trainable_variables)

        @steps.compiled
        def update(state_batch, action_batch, reward_batch, next_state_batch):
            with tf.GradientTape() as tape:
                target_actions = target_actor(next_state_batch, training=True)
                y = reward_batch + 0.9 * target_critic([next_state_batch, target_actions], training=True)
                critic_value = critic_model([state_batch, action_batch], training=True)
                critic_loss = ops.mean(ops.square(y - critic_value))
            critic_grad = tape.gradient(critic_loss, critic_model.trainable_variables)
            critic_optimizer.apply_gradients(zip(critic_grad, critic_model.trainable_variables, strict=True))
            with tf.GradientTape() as tape:
                actions = actor_model(state_batch, training=True)
                actor_loss = -ops.mean(critic_model([state_batch, actions], training=True))
            actor_grad = tape.gradient(actor_loss, actor_model.trainable_variables)
            actor_optimizer.apply_gradients(zip(actor_grad, actor_model.trainable_variables, strict=True))
            for target, original in ((target_actor, actor_model), (target_critic, critic_model)):
                for slow, fast in zip(target.variables, original.variables, strict=True):
                    slow.assign(0.1 * fast + 0.9 * slow)
            return critic_loss, actor_loss

        env, rng, history = Walk(3), np.random.default_rng(4), {"critic": [], "actor": []}
        state, buffer = env.reset(), []
        for _ in range(24):
            action = np.clip(np.asarray(actor_model(state[None]))[0] + 0.1 * rng.standard_normal(1), -1, 1)
            following, reward, _ = env.step(action)
            buffer.append((state, action, [reward], following))
            state = following
            picked = [buffer[each] for each in rng.integers(0, len(buffer), BATCH)]
            losses = update(*steps.mine(*(np.array(each) for each in zip(*picked, strict=True))))
            for name, loss in zip(history, losses, strict=True):
                history[name].append(float(loss))
        return [*actor_model.get_weights(), *target_critic.get_weights()], history

    return Loop(run)


def proximal_policy_optimization():
    """PPO: advantages normalized over the batch, clipped ratios, a divergence that ends the updates early."""

    def run(steps):
        actor = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(2)])
        critic = keras.Sequential([keras.Input((4,)), layers.Dense(6, activation="tanh"), layers.Dense(1)])
        policy_optimizer, value_optimizer = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02)
        policy_optimizer.build(actor.trainable_variables)
        value_optimizer.build(critic.trainable_variables)

        def logprobabilities(logits, a):
            return ops.sum(ops.one_hot(a, 2) * ops.log_softmax(logits), axis=1)

        @steps.compiled
        def train_policy(observations, actions, old_logprobabilities, advantages):
            mean, std = tf.reduce_mean(advantages), tf.math.reduce_std(advantages)
            advantages = (advantages - mean) / (std + 1e-8)
            with tf.GradientTape() as tape:
                ratio = ops.exp(logprobabilities(actor(observations), actions) - old_logprobabilities)
                min_advantage = ops.where(advantages > 0, (1 + 0.2) * advantages, (1 - 0.2) * advantages)
                policy_loss = -ops.mean(ops.minimum(ratio * advantages, min_advantage))
            policy_grads = tape.gradient(policy_loss, actor.trainable_variables)
            policy_optimizer.apply_gradients(zip(policy_grads, actor.trainable_variables, strict=True))
            kl = ops.mean(old_logprobabilities - logprobabilities(actor(observations), actions))
            return ops.sum(kl)

        @steps.compiled
        def train_value(observations, returns):
            with tf.GradientTape() as tape:
                value_loss = ops.mean((returns - ops.squeeze(critic(observations), -1)) ** 2)
            value_grads = tape.gradient(value_loss, critic.trainable_variables)
            value_optimizer.apply_gradients(zip(value_grads, critic.trainable_variables, strict=True))
            return value_loss

        env, rng, history = Walk(5), np.random.default_rng(6), {"kl": [], "value": []}
        for _ in range(EPOCHS):
            observations, actions, before, rewards, state = [], [], [], [], env.reset()
            for _ in range(BATCH + 3):
                logits = actor(state[None])
                action = int(rng.random() < float(tf.nn.softmax(logits)[0, 1]))
                observations.append(state)
                actions.append(action)
                before.append(float(logprobabilities(logits, np.array([action]))[0]))
                state, reward, _ = env.step(action - 0.5)
                rewards.append(reward)
            returns = np.cumsum(rewards[::-1])[::-1].copy()
            advantages = returns - np.asarray(critic(np.array(observations)))[:, 0]
            batch = [np.array(observations), np.array(actions), np.array(before), advantages]
            for _ in range(4):
                history["kl"].append(float(train_policy(*steps.mine(*batch))))
                if history["kl"][-1] > 0.05:
                    break
            for _ in range(4):
                history["value"].append(float(train_value(*steps.mine(np.array(observations), returns))))
        return [*actor.get_weights(), *critic.get_weights()], history

    return Loop(run)


def actor_critic():
    """Actor-critic: an episode as one batch, returns that are normalized, losses as sums of lists."""

    def run(steps):
        inputs = keras.Input((4,))
        common = layers.Dense(8, activation="relu")(inputs)
        model = keras.Model(inputs, [layers.Dense(2, activation="softmax")(common), layers.Dense(1)(common)])
        optimizer = keras.optimizers.Adam(learning_rate=0.01)
        optimizer.build(model.trainable_variables)
        huber_loss = keras.losses.Huber()

        @steps.compiled
        def update(states, actions, returns):
            returns = (returns - tf.reduce_mean(returns)) / (tf.math.reduce_std(returns) + 1e-8)
            with tf.GradientTape() as tape:
                action_probs, critic_value = model(states)
                log_prob = tf.math.log(tf.gather(action_probs, actions, axis=1, batch_dims=1))
                diff = returns - critic_value[:, 0]
                actor_losses = -log_prob * tf.stop_gradient(diff)
                critic_losses = huber_loss(tf.expand_dims(critic_value[:, 0], 1), tf.expand_dims(returns, 1))
                loss_value = tf.reduce_sum(actor_losses) + critic_losses
            grads = tape.gradient(loss_value, model.trainable_variables)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss_value

        env, rng, history = Walk(7), np.random.default_rng(8), {"loss": []}
        for _ in range(2 * EPOCHS):
            states, actions, rewards, state = [], [], [], env.reset()
            for _ in range(int(rng.integers(4, 10))):
                action_probs, _ = model(state[None])
                action = int(rng.random() < float(action_probs[0, 1]))
                states.append(state)
                actions.append(action)
                state, reward, _ = env.step(action - 0.5)
                rewards.append(reward)
            returns = np.cumsum(rewards[::-1])[::-1].copy()
            history["loss"].append(float(update(*steps.mine(np.array(states), np.array(actions), returns))))
        return model.get_weights(), history

    return Loop(run)


EXAMPLES = (
    graph_network,
    graph_attention,
    whole_graph_features,
    node2vec,
    molecular_wgan,
    deep_q_network,
    deep_deterministic_policy_gradient,
    proximal_policy_optimization,
    actor_critic,
)
