"""The README's script and commands, exactly as they are printed there."""

import re
import sys
from pathlib import Path

from tests.launching import hvdtrain, launcher, run

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SCRIPT, CALLBACKS, OPTIONS, LOOP, *PIECES, OWN_MODEL, OWN_DATA = BLOCKS
# What surrounds a piece in a loop of one's own, and trains with it.
AROUND = """
import hashlib
import hvdtrain
hvdtrain.init()
import keras, numpy as np, tensorflow as tf

def build_model():
    keras.utils.set_random_seed(hvdtrain.rank())
    layers = [keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(1, dtype="float32")]
    return keras.Sequential([keras.Input((3,)), *layers])

X = np.random.default_rng(hvdtrain.rank()).standard_normal((16, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
BEGIN = ["model = build_model()", "optimizer = keras.optimizers.Adam(0.01)", "loss = keras.losses.MeanSquaredError()"]

def train(number, piece):
    keras.config.set_dtype_policy("float32")
    names = {"hvdtrain": hvdtrain, "keras": keras, "tf": tf, "np": np, "build_model": build_model}
    exec("\\n".join(BEGIN), names)
    if "def step" not in piece:
        exec(piece, names)
        piece = LOOP
    names["optimizer"].build(names["model"].trainable_variables)
    hvdtrain.broadcast_variables(names["model"].variables + names["optimizer"].variables)
    exec(piece, names)
    losses = [float(names["step"](X, Y)) for _ in range(122)]
    names.get("end_of_epoch", lambda: None)()
    weights = b"".join(v.numpy().tobytes() for v in names["model"].trainable_variables)
    print(f"PIECE {number} {losses[-1] < 0.5 * losses[0]} {hashlib.sha256(weights).hexdigest()}\\n", end="", flush=True)

for number, piece in enumerate([LOOP, *PIECES]):
    train(number, piece)

names = {"hvdtrain": hvdtrain, "build_model": build_model, "loss": keras.losses.MeanSquaredError()}
exec(OPTIONS, names)
x = np.random.default_rng(9).standard_normal((64, 3)).astype("float32")
data = x, x.sum(1, keepdims=True)
before = names["trainer"].evaluate(data).loss
names["trainer"].fit(data, batch=16, epochs=100, verbose=False)
print(f"OPTIONS {names['trainer'].evaluate(data).loss < 0.5 * before}\\n", end="", flush=True)
"""


def test_the_script_trains(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    assert_trained(run([sys.executable, "script.py"], cwd=tmp_path, timeout=150))


def assert_trained(job):
    assert job.code == 0, job.text[-4000:]
    found = re.findall(r"epoch 5/5  val_loss \d+\.\d+  val_accuracy (\d\.\d+)", job.out)
    assert len(found) == 1, job.out
    assert float(found[0]) > 0.85


def test_the_script_is_twenty_lines():
    assert len([line for line in SCRIPT.splitlines() if line.strip()]) <= 20


def test_the_script_with_callbacks_and_prediction_trains_on_two_ranks(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}\n{CALLBACKS}\nprint('LOGITS', logits.shape, flush=True)\n")
    job = run([*launcher("horovodrun", 2), sys.executable, "script.py"], cwd=tmp_path, timeout=150)
    assert_trained(job)
    assert job.out.count("LOGITS (1797, 10)") == 2, job.text[-4000:]
    assert "epoch  1/20" not in job.out, "fit goes on with the sixth epoch"


def test_each_piece_trains_in_a_loop_of_ones_own(tmp_path):
    size = 2
    values = f"LOOP, OPTIONS = {LOOP!r}, {OPTIONS!r}\nPIECES = {PIECES!r}\n"
    (tmp_path / "loop.py").write_text(values + AROUND)
    job = run([*launcher("mpirun", size), sys.executable, "loop.py"], cwd=tmp_path, timeout=300)
    assert job.code == 0, job.text[-4000:]
    found = re.findall(r"PIECE (\d) (\w+) (\w{64})", job.out)
    assert len(PIECES) == 7
    assert [number for number, _, _ in found] == sorted(str(n // size) for n in range(8 * size)), job.text[-4000:]
    assert all(fell == "True" for _, fell, _ in found), found
    assert len({(number, weights) for number, _, weights in found}) == 8, "the ranks drifted apart"
    assert job.out.count("OPTIONS True") == size, job.text[-4000:]
    assert "WARNING" not in job.text.replace("WARNING: All log messages before absl", "")


def test_own_model_and_data(tmp_path):
    (tmp_path / "mypkg").mkdir()
    (tmp_path / "mypkg/mymodel.py").write_text(OWN_MODEL)
    (tmp_path / "mypkg/mydata.py").write_text(OWN_DATA)
    command = re.search(r"python -m hvdtrain (train --model mypkg.*)", README)[1]
    job = hvdtrain("mpirun", 2, *command.split(), "--run-dir", "run", cwd=tmp_path)
    assert job.code == 0, job.text[-4000:]
    found = float(re.search(r"^validation +accuracy (\d\.\d+)", job.out, re.MULTILINE)[1])
    assert found > 0.5


def test_the_verbs_of_the_table_exist(tmp_path):
    verbs = re.findall(r"^\| `(\w+)[^|]*` \|", README[README.index("| verb |") :], re.MULTILINE)[:7]
    assert verbs == ["train", "evaluate", "data", "bench", "recipes", "env", "doctor"]
    for verb in verbs:
        job = hvdtrain("none", 1, verb, "--help", cwd=tmp_path)
        assert job.code == 0, job.text
        assert "usage" in job.out.lower()


def test_recipes_and_env(tmp_path):
    recipes = hvdtrain("none", 1, "recipes", cwd=tmp_path)
    assert re.search(r"^digits  +\S", recipes.out, re.MULTILINE)
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
