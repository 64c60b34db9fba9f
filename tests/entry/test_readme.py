"""The README's script and commands, exactly as they are printed there."""

import re
import sys
from pathlib import Path

import pytest

from tests.launching import hvdtrain, launcher, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SCRIPT, LOOP = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("controller", "size"), [("none", 1), ("horovodrun", 2), ("gloo", 2), ("mpirun", 4)])
def test_the_script_trains(tmp_path, controller, size):
    (tmp_path / "script.py").write_text(SCRIPT)
    job = run([*launcher(controller, size), sys.executable, "script.py"], cwd=tmp_path, timeout=150)
    assert job.code == 0, job.text[-4000:]
    found = re.findall(r"epoch 5/5  val_loss \d+\.\d+  val_accuracy (\d\.\d+)", job.out)
    assert len(found) == 1, job.out
    assert float(found[0]) > 0.85


def test_the_script_is_twenty_lines():
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 20


def test_the_loop_trains(tmp_path):
    (tmp_path / "loop.py").write_text(
        "import hvdtrain\nhvdtrain.init()\nimport keras, numpy as np, tensorflow as tf\n"
        "model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])\n"
        "optimizer, loss = keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError()\n"
        "optimizer.build(model.trainable_variables)\n"
        f"{LOOP}\n"
        "x = np.random.default_rng(hvdtrain.rank()).standard_normal((16, 3)).astype('float32')\n"
        "losses = [float(step(x, x.sum(1, keepdims=True))) for _ in range(30)]\n"
        "print('FELL', losses[-1] < 0.1 * losses[0], flush=True)\n"
    )
    job = run([*launcher("mpirun", 2), sys.executable, "loop.py"], cwd=tmp_path, timeout=100)
    assert job.code == 0, job.text[-4000:]
    assert job.out.count("FELL True") == 2, job.text[-4000:]


def test_the_verbs_of_the_table_exist(tmp_path):
    verbs = re.findall(r"^\| `(\w+)[^|]*` \|", README[README.index("| verb |") :], re.MULTILINE)[:5]
    assert verbs == ["train", "evaluate", "recipes", "env", "doctor"]
    for verb in verbs:
        job = hvdtrain("none", 1, verb, "--help", cwd=tmp_path)
        assert job.code == 0, job.text
        assert "usage" in job.out.lower()


def test_recipes_and_env(tmp_path):
    recipes = hvdtrain("none", 1, "recipes", cwd=tmp_path)
    assert re.search(r"^digits  \S", recipes.out, re.MULTILINE)
    env = hvdtrain("none", 1, "env", cwd=tmp_path)
    assert env.code == 0
    for word in ("hvdtrain", "Python", "TensorFlow", "Horovod"):
        assert word.lower() in env.out.lower()


def test_doctor_finds_this_installation_sound(tmp_path):
    job = hvdtrain("none", 1, "doctor", cwd=tmp_path, timeout=300)
    assert job.code == 0, job.text[-4000:]
    assert "failed" not in job.out.splitlines()[-1] or "0 failed" in job.out
    for word in ("gloo", "mpi"):
        assert word in job.out.lower()


def test_help_comes_once_from_many_ranks(tmp_path):
    job = hvdtrain("mpirun", 2, "--help", cwd=tmp_path)
    assert job.code == 0
    assert job.out.count("usage:") == 1
