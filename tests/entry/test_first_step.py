"""What a training costs before its first step."""

import re

import pytest

from tests.launching import Job, launched

SCRIPT = """
import keras, numpy as np, tensorflow as tf
import hvdtrain

hvdtrain.init()
traced = []

class Noted(keras.layers.Layer):
    def call(self, inputs):
        traced.append(type(inputs).__name__)
        return inputs

model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), Noted()])
del traced[:]
trainer = hvdtrain.Trainer(model, "adam", "mse")
trainer.fit(np.ones((96, 4)), np.ones((96, 3)), batch=2, epochs=2, verbose=0)
mine = tf.function(lambda x: traced.append("mine") or hvdtrain.allreduce(x, name="mine"))
mine(tf.ones([2]))
print(f"TRACED {len(traced)}", flush=True)
"""


@pytest.mark.extended
def test_ranks_trace_a_step_as_often_as_one_process(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)

    def traces(controller, size):
        job = Job(launched(controller, size, "script.py"), cwd=tmp_path).expect(timeout=180)
        return re.findall(r"TRACED (\d+)", job.text)

    (alone,) = traces("none", 1)
    assert traces("mpirun", 2) == [alone] * 2
