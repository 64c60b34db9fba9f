"""Scripts of TensorFlow 1, with the structure of Horovod's examples."""

import re
from pathlib import Path

import pytest

from tests.launching import Job, launched

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
SESSIONS = re.search(r"## Graphs and sessions of TensorFlow 1.*?```python\n(.*?)```", PAGE, re.DOTALL)[1]

WORD_VECTORS = """
import math, random
import numpy as np
import tensorflow.compat.v1 as tf
import hvdtrain.horovod as hvd

tf.disable_v2_behavior()
hvd.init()
random.seed(hvd.rank())
words, width = 50, 8
graph = tf.Graph()
with graph.as_default():
    inputs = tf.placeholder(tf.int32, shape=[None])
    labels = tf.placeholder(tf.int32, shape=[None, 1])
    embeddings = tf.Variable(tf.random_uniform([words, width], -1.0, 1.0))
    embed = tf.nn.embedding_lookup(embeddings, inputs)
    nce_weights = tf.Variable(tf.truncated_normal([words, width], stddev=1.0 / math.sqrt(width)))
    nce_biases = tf.Variable(tf.zeros([words]))
    loss = tf.reduce_mean(tf.nn.nce_loss(nce_weights, nce_biases, labels, embed, num_sampled=8, num_classes=words))
    optimizer = hvd.DistributedOptimizer(tf.train.GradientDescentOptimizer(1.0 * hvd.size()))
    train_op = optimizer.minimize(loss)
    init = tf.global_variables_initializer()
    bcast = hvd.broadcast_global_variables(0)

config = tf.ConfigProto()
config.gpu_options.allow_growth = True
config.gpu_options.visible_device_list = str(hvd.local_rank())
with tf.Session(graph=graph, config=config) as session:
    init.run()
    bcast.run()
    for _ in range(20):
        batch = random.randint(8, 16)  # ranks touch different numbers of rows
        pairs = np.random.randint(0, words, (2, batch))
        session.run([train_op, loss], feed_dict={inputs: pairs[0], labels: pairs[1][:, None]})
    print("TRAINED words", sum(each.sum().item() for each in session.run([embeddings, nce_weights, nce_biases])))
"""

DIGITS = """
layers = tf.layers

def model_of(feature, target):
    feature = tf.reshape(feature, [-1, 8, 8, 1])
    with tf.variable_scope("conv_layer1"):
        hidden = layers.conv2d(feature, 4, kernel_size=[3, 3], activation=tf.nn.relu, padding="SAME")
        hidden = tf.nn.max_pool(hidden, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding="SAME")
    flat = tf.reshape(hidden, [-1, 64])
    logits = layers.dense(layers.dropout(layers.dense(flat, 16, activation=tf.nn.relu), rate=0.5, training=True), 10)
    return tf.losses.softmax_cross_entropy(tf.one_hot(tf.cast(target, tf.int32), 10, 1, 0), logits)

def main(_):
    from hvdtrain.data.digits import load_digits

    images, labels = load_digits()
    images = 16 * images.reshape(-1, 64)
    with tf.name_scope("input"):
        image = tf.placeholder(tf.float32, [None, 64], name="image")
        label = tf.placeholder(tf.float32, [None], name="label")
    loss = model_of(image, label)
    opt = hvd.DistributedOptimizer(tf.train.AdamOptimizer(0.001 * hvd.size()), op=hvd.Average,
                                   gradient_predivide_factor=2.0, backward_passes_per_step=2)
    global_step = tf.train.get_or_create_global_step()
    train_op = opt.minimize(loss, global_step=global_step)
    hooks = [
        hvd.BroadcastGlobalVariablesHook(0),
        tf.train.StopAtStepHook(last_step=40 // hvd.size()),
        tf.train.LoggingTensorHook(tensors={"step": global_step, "loss": loss}, every_n_iter=10),
    ]
    checkpoint_dir = "./checkpoints" if hvd.rank() == 0 else None
    place, trained = hvd.rank(), None
    with tf.train.MonitoredTrainingSession(checkpoint_dir=checkpoint_dir, hooks=hooks, config=config) as mon_sess:
        while not mon_sess.should_stop():
            part = slice(place * 32, place * 32 + 32)
            place += hvd.size()
            mon_sess.run(train_op, feed_dict={image: images[part], label: labels[part]})
            if not mon_sess.should_stop():
                trained = mon_sess.run(tf.trainable_variables())
    print("TRAINED digits", sum(float(abs(each).sum()) for each in trained), flush=True)

if __name__ == "__main__":
    tf.app.run()
"""


def test_scripts_with_sessions_train_and_the_ranks_agree(tmp_path):
    update = "        session.run(update"
    page = SESSIONS.replace(update, f"        before = session.run(weights)\n{update}")
    page += "print('TRAINED page', before.sum(), flush=True)\ntf.reset_default_graph()\n"
    (tmp_path / "train.py").write_text("\n".join([page, WORD_VECTORS, DIGITS]))
    command = launched("gloo", 2, "train.py")
    job = Job(command, cwd=tmp_path, TF_USE_LEGACY_KERAS="1").expect(timeout=180)
    found = re.findall(r"TRAINED (\w+) (\S+)", job.out)
    assert [name for name, _ in sorted(found)] == sorted(2 * ["page", "words", "digits"]), job.text[-4000:]
    assert len(set(found)) == 3, f"the ranks drifted apart: {found}"
    assert (tmp_path / "checkpoints/model.ckpt-20.index").exists()
    assert (tmp_path / "checkpoints/session/model.ckpt-50.index").exists()
