"""What `hvdtrain doctor --script` says of TensorFlow and Keras in Horovod scripts is true of the installed versions."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.cli.migrate import keras2
from hvdtrain.horovod.flavour import IS_LEGACY
from tests.unit.cli.migrate.test_script import HAND, analyse

pytestmark = pytest.mark.skipif(IS_LEGACY, reason="these are Keras 3's names; tf_keras has Keras 2's")
START = """\
import keras
import numpy as np
import tensorflow as tf
from tensorflow.keras import backend as K
import hvdtrain.horovod as hvd
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
optimizer = tf.keras.optimizers.SGD(0.1)
scaling = tf.keras.mixed_precision.LossScaleOptimizer(tf.keras.optimizers.SGD(0.1))
x = tf.keras.Input((2,))
y = tf.keras.layers.Dense(1)(x)
metric = tf.keras.metrics.Mean()
"""


def advice(tmp_path, text):
    path = tmp_path / "a.py"
    path.write_text(START + text + "\n")
    first = START.count("\n")
    return [
        f.advice for each in analyse([path], {}).judged for f in each.findings if f.verdict == HAND and f.line > first
    ]


@pytest.fixture(scope="module")
def names():
    """What the start of a script binds, with a model that is built."""
    bound = {}
    exec(START, bound)
    bound["model"].build((None, 2))
    bound["optimizer"].build(bound["model"].trainable_variables)
    return bound


FAILING = """\
optimizer.lr
optimizer.lr.assign(0.5)
float(optimizer.lr)
K.set_value(optimizer.lr, 0.5)
K.set_value(optimizer.learning_rate, 0.5)
keras.backend.set_value(optimizer.learning_rate, 0.5)
keras.backend.get_value(optimizer.learning_rate)
K.set_session(None)
K.get_session()
K.learning_phase()
K.set_learning_phase(1)
optimizer.variables()
optimizer.weights
optimizer.get_weights()
optimizer.get_gradients(1, 2)
optimizer.get_updates(1, 2)
optimizer.minimize(1, [])
optimizer.get_slot_names()
optimizer.get_slot(1, "m")
optimizer._decayed_lr(tf.float32)
optimizer._get_hyper("learning_rate")
optimizer._set_hyper("learning_rate", 1)
optimizer._compute_gradients(1, [])
optimizer._create_all_weights([])
optimizer.decay
optimizer.apply_gradients([], name="x")
optimizer.apply_gradients([], experimental_aggregate_gradients=False)
optimizer.apply_gradients([], skip_gradients_aggregation=True)
scaling.get_unscaled_gradients([1.0])
scaling.loss_scale
tf.keras.optimizers.SGD(lr=0.1)
keras.optimizers.Adam(lr=0.1)
tf.optimizers.Adam(lr=0.1)
tf.keras.optimizers.legacy.SGD(0.1)
tf.keras.optimizers.experimental.SGD(0.1)
tf.compat.v1.keras.optimizers.SGD(lr=0.1)
tf.keras.mixed_precision.experimental.set_policy("float32")
tf.train.experimental.enable_mixed_precision_graph_rewrite(optimizer)
model.compile(optimizer, "mse", experimental_run_tf_function=False)
model.compile(optimizer, "mse", experimental_steps_per_execution=1)
model.compile(optimizer, "mse", sample_weight_mode="temporal")
model.compile(optimizer, "mse", target_tensors=None)
model.fit(np.ones((4, 2)), workers=1)
model.fit(np.ones((4, 2)), use_multiprocessing=True)
model.fit(np.ones((4, 2)), max_queue_size=1)
model.fit(np.ones((4, 2)), nb_epoch=1)
model.evaluate(np.ones((4, 2)), workers=1)
model.predict(np.ones((4, 2)), use_multiprocessing=True)
model.train_on_batch(np.ones((4, 2)), reset_metrics=False)
model.fit_generator([])
model.evaluate_generator([])
model.predict_generator([])
model.predict_classes(np.ones((4, 2)))
model.to_yaml()
model.add_metric(1.0)
model.reset_states()
metric.reset_states()
model.save_weights("w.h5")
model.save_weights(f"{metric.name}.ckpt")
model.load_weights("w.ckpt")
model.save("folder")
tf.keras.models.save_model(model, "folder")
tf.keras.callbacks.ModelCheckpoint("a.keras", period=1)
tf.keras.callbacks.ModelCheckpoint("a-{epoch}.hdf5")
tf.keras.callbacks.ModelCheckpoint(filepath="./%s/a" % metric.name)
tf.keras.callbacks.ModelCheckpoint("a.h5", save_weights_only=True)
keras.callbacks.ModelCheckpoint("{}.ckpt".format(1), save_weights_only=True)
tf.keras.callbacks.TensorBoard("l", write_grads=True)
tf.keras.callbacks.TensorBoard("l", batch_size=1)
tf.keras.callbacks.experimental.BackupAndRestore("a")
tf.keras.regularizers.l2(l=1e-4)
tf.keras.initializers.normal()
tf.keras.losses.mean_squared_error
tf.keras.layers.Dense(1, weights=[1])
tf.keras.layers.Dense(1, batch_input_shape=(1, 2))
tf.keras.layers.BatchNormalization(fused=True)
tf.keras.layers.LSTM(2, time_major=True)
tf.keras.layers.CuDNNLSTM(2)
tf.keras.layers.DenseFeatures
tf.keras.layers.LocallyConnected1D
tf.keras.layers.experimental.preprocessing.Rescaling(1.0)
tf.keras.layers.experimental.SyncBatchNormalization()
tf.keras.layers.Layer().add_weight("w", shape=(1,))
tf.keras.Model(input=x, output=y)
tf.nn.relu(y)
tf.reshape(tf.keras.Input((2,)), [-1])
tf.keras.experimental.CosineDecay(0.1, 1)
tf.keras.utils.multi_gpu_model(model)
tf.keras.utils.OrderedEnqueuer
tf.keras.estimator.model_to_estimator(model)
tf.compat.v1.keras.backend.set_session(None)
tf.compat.v1.layers.dense
tf.ConfigProto()
tf.Session()
tf.placeholder(tf.float32)
tf.train.AdamOptimizer(0.1)
tf.train.get_or_create_global_step()
tf.logging.set_verbosity(1)
tf.set_random_seed(1)
tf.enable_eager_execution()
tf.contrib.layers
tf.estimator.Estimator
from tensorflow.keras.utils import np_utils
from tensorflow.keras.wrappers.scikit_learn import KerasClassifier
from keras.utils import multi_gpu_model
from keras.layers.normalization import BatchNormalization
from keras.layers.core import Dense
from keras.preprocessing.image import ImageDataGenerator
from keras.optimizers import SGD; SGD(lr=0.1)
import keras.layers.convolutional
from tensorflow.python.keras.optimizers import Adam
""".splitlines()


def fails(line, names):
    """Whether a line raises, for a reason that is Keras's."""
    try:
        exec(line, dict(names))
    except (AttributeError, TypeError, ValueError, ImportError, NotImplementedError):
        return True
    return False


@pytest.mark.extended
def test_what_fails_on_keras_3_is_said(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    assert [line for line in FAILING if len(advice(tmp_path, line)) != 1] == []
    assert [line for line in FAILING if not fails(line, names)] == []


WORKING = """\
float(optimizer.learning_rate)
optimizer.learning_rate = 0.5
optimizer.learning_rate.assign(0.5)
K.get_value(optimizer.learning_rate)
len(optimizer.variables)
optimizer.iterations
scaling.scale_loss(1.0)
tf.keras.optimizers.SGD(0.1, clipvalue=1.0)
tf.optimizers.Adam(0.1)
tf.compat.v1.keras.optimizers.SGD(0.1)
tf.compat.v1.train.AdamOptimizer(0.1)
tf.compat.v1.ConfigProto()
tf.compat.v1.Session()
tf.compat.v1.logging.set_verbosity("INFO")
model.compile(loss=tf.losses.SparseCategoricalCrossentropy(), optimizer=optimizer)
model.reset_metrics()
metric.reset_state()
model.save_weights("w.weights.h5")
model.save("m.keras")
model.save("m.h5")
tf.keras.callbacks.ModelCheckpoint("a-{epoch}.h5")
tf.keras.callbacks.ModelCheckpoint("a.keras", save_freq="epoch")
tf.keras.callbacks.ModelCheckpoint("a.weights.h5", save_weights_only=True)
tf.keras.callbacks.TensorBoard("l", histogram_freq=1, profile_batch=0)
tf.train.Checkpoint(model=model, optimizer=optimizer).save("folder/ck")
tf.keras.layers.Dense(1, input_shape=(2,))
tf.keras.layers.Dense(1, input_dim=2)
tf.keras.layers.BatchNormalization(renorm=True)
tf.keras.layers.LeakyReLU(alpha=0.1)
tf.keras.layers.Lambda(tf.nn.relu)(x)
tf.keras.initializers.VarianceScaling(distribution="normal")
tf.keras.applications.resnet50.ResNet50
tf.keras.layers.Layer().add_weight(name="w", shape=(1,))
tf.keras.mixed_precision.set_global_policy("float32")
tf.keras.utils.to_categorical(np.arange(3), 3)
tf.keras.preprocessing.image.ImageDataGenerator
tf.config.experimental.set_visible_devices([], "GPU")
tf.data.experimental.AUTOTUNE
tf.nn.relu(tf.ones(2))
K.clear_session()
K.image_data_format()
K.mean(tf.ones(2))
from tensorflow.keras.optimizers.schedules import CosineDecay
from tensorflow.python.keras import backend as old
from tensorflow.python.framework import ops
import tensorflow.compat.v1 as tf1; tf1.placeholder
""".splitlines()


def test_what_works_on_keras_3_is_not_complained_about(tmp_path, monkeypatch, names):
    monkeypatch.chdir(tmp_path)
    assert [line for line in WORKING if advice(tmp_path, line)] == []
    assert [line for line in WORKING if fails(line, names)] == []


def test_what_has_no_effect_on_keras_3_is_said(tmp_path):
    assert "assigning lr changes nothing" in advice(tmp_path, "optimizer.lr = 0.5")[0]
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.lr = 0.5
    assert float(optimizer.learning_rate) == np.float32(0.1)
    assert "Keras 3 ignores decay" in advice(tmp_path, "tf.keras.optimizers.SGD(0.1, decay=0.5)")[0]
    with pytest.warns(UserWarning, match="decay"):
        keras.optimizers.SGD(0.1, decay=0.5)


def test_models_of_keras_2_and_lambda_layers_do_not_load(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert "save and load .keras" in advice(tmp_path, "tf.keras.models.load_model('m.h5')")[0]
    assert (
        "save and load .keras" in advice(tmp_path, "hvd_keras = hvd.keras; hvd_keras.load_model(filepath='m.hdf5')")[0]
    )
    assert advice(tmp_path, "tf.keras.models.load_model('m.h5', compile=False)") == []
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.save("m.h5")
    with pytest.raises(ValueError, match="Could not deserialize"):
        keras.models.load_model("m.h5")
    line = "tf.keras.layers.Lambda(lambda x: 2 * x)\ntf.keras.models.load_model('m.keras')"
    assert "enable_unsafe_deserialization" in advice(tmp_path, line)[0]
    assert advice(tmp_path, line.splitlines()[0]) == []
    keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: 2 * x)]).save("m.keras")
    with pytest.raises(ValueError, match="lambda"):
        keras.models.load_model("m.keras")


def test_images_of_a_generator_do_not_end_with_what_doctor_says(tmp_path):
    lines = (
        "g = tf.keras.preprocessing.image.ImageDataGenerator()\nimages = g.flow(np.ones((20, 2, 2, 1)), batch_size=4)\n"
    )
    said = advice(tmp_path, f"{lines}model.fit(images, steps_per_epoch=3)")
    problem = "Keras 3 cuts short the epoch in which images ends, where Keras 2 began it anew"
    assert said == [f"{problem}: pass (batch for batch in images)."]
    for data in ("g.flow_from_directory('train')", "x=g.flow(np.ones((20, 2, 2, 1)))"):
        assert "pass (batch for batch in flow" in advice(tmp_path, f"{lines}model.fit({data}, steps_per_epoch=3)")[0]
    for line in ("model.fit(images, steps_per_epoch=3, workers=4)", "model.fit_generator(images, 3)"):
        (said,) = advice(tmp_path, lines + line)
        assert problem in said
        assert ("PyDataset" if "workers" in line else "fit(generator, steps_per_epoch=...)") in said
    for line in ("model.fit(images)", "model.fit((batch for batch in images), steps_per_epoch=3)"):
        assert advice(tmp_path, lines + line) == []

    steps = []
    count = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: steps.append(0),
        on_train_batch_end=lambda batch, logs: steps.append(steps.pop() + 1),
    )
    inner = [keras.Input((2, 2, 1)), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(inner)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    images = keras.src.legacy.preprocessing.image.ImageDataGenerator().flow(
        np.ones((20, 2, 2, 1)), np.ones(20), batch_size=4
    )
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(images, steps_per_epoch=3, epochs=3, verbose=0, callbacks=[count])
    assert steps == [3, 2, 3]
    steps.clear()
    model.fit((batch for batch in images), steps_per_epoch=3, epochs=3, verbose=0, callbacks=[count])
    assert steps == [3, 3, 3]


def test_a_wrapped_optimizer_has_what_doctor_says(tmp_path):
    """hvd.DistributedOptimizer gives Keras 3's optimizers most of what Keras 2's had."""
    import hvdtrain.horovod as hvd

    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    with pytest.raises(AttributeError, match="has no get_gradients"):  # for those that bring their own
        wrapped.get_gradients(tf.constant(1.0), [])
    lines = "optimizer = hvd.DistributedOptimizer(optimizer)\n"
    for name in keras2.OPTIMIZER_MEMBERS:
        said = advice(tmp_path, f"{lines}model.optimizer.{name}\noptimizer.{name}")
        is_refused = name == "get_gradients" or not hasattr(wrapped, name)
        assert (name in keras2.REFUSED_BY_WRAPPED) == is_refused, name
        assert len(said) == 2 * is_refused, name
    assert advice(tmp_path, f"{lines}optimizer.variables()\noptimizer.apply_gradients([], name='x')") == []
    wrapped.variables()


def test_each_argument_that_has_gone_is_named(tmp_path):
    (said,) = advice(tmp_path, "keras.optimizers.Adam(lr=0.1, decay=1e-6)")
    assert said.startswith("lr: the argument is called learning_rate. decay: Keras 3 ignores decay")
