"""A model whose halves are on two devices of one process, as with `tf.device` since TensorFlow 1."""

import json
import subprocess
import sys
import textwrap

import pytest

HALVES = """\
    import json

    import keras
    import numpy as np
    import tensorflow as tf

    import hvdtrain

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    hvdtrain.init()

    class Halves(keras.Model):
        def __init__(self, second):
            super().__init__()
            keras.utils.set_random_seed(1)
            self.where = second
            self.hidden = keras.layers.Dense(32, activation="relu")
            self.norm = keras.layers.BatchNormalization()
            self.out = keras.layers.Dense(4)

        def build(self, shape):
            with tf.device("CPU:0"):
                self.hidden.build(shape)
            with tf.device(self.where):
                self.norm.build((None, 32))
                self.out.build((None, 32))
            self.built = True

        def call(self, x, training=False):
            with tf.device("CPU:0"):
                x = self.hidden(x)
            with tf.device(self.where):
                return self.out(self.norm(x, training=training))

    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((90, 8), dtype=np.float32), rng.integers(0, 4, 90)

    def trained(second):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        trainer = hvdtrain.Trainer(Halves(second), keras.optimizers.Adam(1e-2), loss, accumulate=2, clip_norm=1.0)
        trainer.fit(x, y, batch=24, epochs=3, validation_data=(x, y), verbose=0)
        return trainer

    def devices(variables):
        return [variable.value.device[-5:] for variable in variables]

    one, two = trained("CPU:0"), trained("CPU:1")
    two.save("checkpoints")
    restored = trained("CPU:0")
    restored.restore("checkpoints")
    print(json.dumps({
        "weights": devices(two.model.weights),
        "slots": devices(two.optimizer.variables),
        "hashes": [trainer.state.parameter_hash() for trainer in (one, two, restored)],
    }))
"""


@pytest.mark.extended  # it needs a process of its own, and three trainings in it
def test_halves_of_a_model_on_two_devices_train_as_on_one(tmp_path):
    (tmp_path / "halves.py").write_text(textwrap.dedent(HALVES))
    words = [sys.executable, "halves.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["weights"] == ["CPU:0"] * 2 + ["CPU:1"] * 6
    # The steps, the rate, and two slots for each weight that is trained, beside it.
    assert found["slots"] == ["CPU:0"] * 6 + ["CPU:1"] * 8
    assert len(set(found["hashes"])) == 1
