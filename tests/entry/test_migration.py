"""The examples of docs/migration.md, exactly as they are printed there, on small data."""

import re
import sys
from pathlib import Path

import pytest

from hvdtrain.cli.migrate.report import analyse
from tests.launching import Job, hvdtrain, launched

ROOT = Path(__file__).parents[2]
FIT, TAPE, RESNET, ELASTIC, LEGACY, *_ = re.findall(  # the others: tests/entry/test_session_scripts.py
    r"```python\n(.*?)```", (ROOT / "docs/migration.md").read_text(encoding="utf-8"), re.DOTALL
)
# What the examples load, small and made up.
AROUND = """
import keras, numpy as np, tensorflow as tf
import horovod.tensorflow

rng = np.random.default_rng(0)
digits = rng.integers(0, 255, (256, 28, 28)).astype("float32"), rng.integers(0, 10, 256)
keras.datasets.mnist.load_data = lambda path: (digits, digits)

def images(folder, **options):
    pixels, labels = rng.random((16, 8, 8, 3), "float32"), np.arange(16) % 4
    return tf.data.Dataset.from_tensor_slices((pixels, labels)).batch(4)

def small(weights):
    layers = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(4, activation="softmax")]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])

keras.utils.image_dataset_from_directory = images
keras.applications.ResNet50 = small

def train(name, text):
    keras.utils.set_random_seed(horovod.tensorflow.rank() if horovod.tensorflow.is_initialized() else 0)
    names = {}
    exec(text, names)
    model = names["model"]
    shared = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
    epoch = names.get("resume_from", "")
    kind = type(getattr(model, "optimizer", None) or names["optimizer"]).__mro__[1].__name__
    print(f"TRAINED {name} {epoch} {shared!r} {kind}\\n", end="", flush=True)
"""


# 20 s: four scripts of Horovod train, in one launch.
def test_the_examples_train_and_the_ranks_agree(tmp_path):
    first, second = (RESNET.replace("rate = 90", f"rate = {epochs}") for epochs in (2, 3))
    calls = [f"train({n!r}, {t!r})" for n, t in zip("ftrs", (FIT, TAPE, first, second), strict=True)]
    calls[1:1] = ["import hvdtrain.horovod", "hvdtrain.horovod.start_timeline('timeline.json')"]
    calls[4:4] = ["hvdtrain.horovod.stop_timeline()"]
    (tmp_path / "examples.py").write_text("\n".join([AROUND, *calls]))
    job = Job(launched("gloo", 2, "examples.py"), cwd=tmp_path, HOROVOD_TIMELINE="DYNAMIC").expect(timeout=200)
    found = re.findall(r"TRAINED (\w) (\d*) (\S+) (\w+)", job.out)
    assert len(found) == 8, job.text[-4000:]
    assert len(set(found)) == 4, f"the ranks drifted apart: {found}"
    assert {(name, epoch) for name, epoch, *_ in found} == {("f", ""), ("t", ""), ("r", "0"), ("s", "2")}
    assert {kind for name, *_, kind in found if name != "t"} == {"Distributed"}
    assert (tmp_path / "checkpoints/mnist-1.index").exists()
    assert (tmp_path / "checkpoint-3.keras").exists()
    assert "ALLREDUCE" in (tmp_path / "timeline.json").read_text()


AROUND_LEGACY = """
import os
os.environ["TF_USE_LEGACY_KERAS"] = "1"
import numpy as np, tensorflow as tf

rng = np.random.default_rng(0)
digits = rng.integers(0, 255, (256, 28, 28)).astype("float32"), rng.integers(0, 10, 256)
tf.keras.datasets.mnist.load_data = lambda path: (digits, digits)
"""
AFTER_LEGACY = """
hvd.allreduce(0.0)  # rank 0 has written its file
loaded = hvd.load_model("mnist-2.h5")
steps = [int(each.optimizer.iterations) for each in (model, loaded)]
shared = sum(float(np.abs(weight).sum()) for weight in model.get_weights())
kinds = [kind.__module__ for kind in type(loaded.optimizer).__mro__ if kind.__module__.startswith("tf_keras")]
print(f"TRAINED {steps} {shared!r} {kinds[0]}\\n", end="", flush=True)
"""


@pytest.mark.extended
def test_the_example_of_keras_2_trains_and_the_ranks_agree(tmp_path):
    text = "\n".join([AROUND_LEGACY, LEGACY, AFTER_LEGACY])
    (tmp_path / "train.py").write_text(text)
    job = Job(launched("mpirun", 2, "train.py"), cwd=tmp_path).expect()
    found = re.findall(r"TRAINED (.*)", job.out)
    assert len(found) == 2, job.text[-4000:]
    assert len(set(found)) == 1, f"the ranks drifted apart: {found}"
    assert found[0].startswith("[50, 50] ")  # each of two passes
    assert found[0].endswith(" tf_keras.src.optimizers.legacy.adam")


DYING = """
import os, signal
import horovod.tensorflow
import keras

class Dying(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2 and horovod.tensorflow.size() == 2 and horovod.tensorflow.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def elastic_job(folder, script, hosts):
    """Run a script with two ranks at first on what the shell commands `hosts` print."""
    (folder / "train.py").write_text(script)
    discover = folder / "discover.sh"
    discover.write_text(f"#!/bin/sh\n{hosts}\n")
    discover.chmod(0o755)
    command = ["horovodrun", "--gloo", "-np", "2", "--min-np", "1", "--max-np", "2"]
    command += ["--network-interfaces", "lo", "--host-discovery-script", str(discover), sys.executable, "train.py"]
    # A rank waits so long for one that is still importing TensorFlow; Horovod cannot read a cycle time twice: the
    # second time it crashes.
    return Job(command, cwd=folder, HOROVOD_CYCLE_TIME="0.5").expect(code=None)


@pytest.mark.extended
def test_the_elastic_example_outlives_a_rank(tmp_path):
    script = ELASTIC.replace("callbacks = [\n", "callbacks = [\n        Dying(),\n")
    end = "history = train(state)\nprint('DONE', hvd.size(), state.epoch, len(history.epoch), flush=True)\n"
    script = DYING + script.replace("train(state)\n", end)
    job = elastic_job(tmp_path, script, "echo localhost:1; echo 127.0.0.1:1")
    # After the loss in the third epoch, two were committed: three are left.
    assert "DONE 1 5 3" in job.out, job.text[-6000:]


@pytest.mark.parametrize(
    "text", [FIT, TAPE, RESNET, ELASTIC, LEGACY], ids=["fit", "tape", "resnet", "elastic", "legacy"]
)
def test_doctor_has_nothing_to_say_of_the_examples(tmp_path, text):
    (tmp_path / "train.py").write_text(text)
    (judged,) = analyse([tmp_path / "train.py"], {}).judged
    assert {finding.verdict for finding in judged.findings} == {"works as is"}


@pytest.mark.extended
def test_doctor_reads_and_rewrites_a_script(tmp_path):
    before = FIT.replace("hvdtrain.horovod.keras", "horovod.tensorflow.keras")
    (tmp_path / "train.py").write_text(before)
    job = hvdtrain("none", 1, "doctor", "--script", "train.py", "--write", cwd=tmp_path)
    assert "+import hvdtrain.horovod.keras as hvd" in job.out
    assert (tmp_path / "train.py").read_text() == FIT
    job = hvdtrain("none", 1, "doctor", "--script", ".", "--all", cwd=tmp_path)
    assert "train.py:5: hvd.init(...): works as is\n" in job.out
    job = hvdtrain("none", 1, "doctor", "--script", "none.py", cwd=tmp_path, code=2)
    assert "Traceback" not in job.text
