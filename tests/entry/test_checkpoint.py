"""`checkpoint list`, `verify` and `export`, and what is done with a damaged checkpoint."""

import os
import re
import sys
import textwrap
import zipfile

import numpy as np
import pytest

from tests.launching import Job, hvdtrain

pytestmark = pytest.mark.extended

SCRIPT = """\
    import sys
    import keras
    import numpy as np
    import hvdtrain

    def build():
        return keras.Sequential([keras.Input((5,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])

    if __name__ == "__main__":
        hvdtrain.init()
        x = np.random.default_rng(0).standard_normal((50, 5)).astype("float32")
        trainer = hvdtrain.Trainer(build(), "adam", keras.losses.MeanSquaredError())
        trainer.fit(x, x[:, :3], batch=16, epochs=2, checkpoint="own", verbose=0)
        np.savez("expected.npz", *trainer.model.get_weights())
        from hvdtrain.cli.train import parse
        from hvdtrain.runs.run import train
        from hvdtrain.runtime.session import current
        words = "digits --epochs 3 --max-steps 60 --run-dir run --ema 0.9 --keep-best val_accuracy --plots False"
        request = parse(words.split())
        train(current(), request.config, request.files.run_dir)
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with the checkpoints of a script, `own`, and with a run."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "script.py").write_text(textwrap.dedent(SCRIPT))
    Job([sys.executable, "script.py"], cwd=folder).expect()
    return folder


def checkpoint(home, *words):
    return hvdtrain("none", 1, "checkpoint", *map(str, words), cwd=home, code=None)


def test_list_shows_what_is_there(home):
    shown = checkpoint(home, "list", "run")
    assert shown.code == 0, shown.text
    rows = shown.out.splitlines()
    assert rows[0].split() == ["step", "epoch", "saved", "size"]
    assert [row.split()[:2] for row in rows[1:]] == [["23", "1"], ["46", "2"], ["60", "3"]]
    assert any(re.search(r" MB|kB  best so far: val_accuracy 0\.\d+$", row) for row in rows[1:])
    assert checkpoint(home, "list", "run/checkpoints").out == shown.out
    assert checkpoint(home, "list", "own/step-00000004").out.splitlines()[1].split()[:2] == ["4", "1"]


def test_verify_names_what_is_damaged(home):
    good = checkpoint(home, "verify", "own")
    assert (good.code, good.out.splitlines()[-1]) == (0, "2 of 2 checkpoints are good")
    file = home / "own" / "step-00000008" / "tensors-00000.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"?")
    damaged = checkpoint(home, "verify", "own")
    file.write_bytes(content)
    assert damaged.code == 1
    assert "step-00000004  good" in damaged.out
    assert re.search(rf"step-00000008  The checkpoint .* is damaged: in {file.name} the bytes of", damaged.out)


def test_a_folder_without_checkpoints_is_refused(home):
    for command in ("list", "verify"):
        job = checkpoint(home, command, ".")
        assert job.code == 2
        assert "hvdtrain: error: There is no checkpoint in ." in job.err
    job = checkpoint(home, "exprot", "run")
    assert "checkpoint has no command 'exprot'. Perhaps you meant: export" in job.err


EXPORTS = """
import sys
from hvdtrain.config.errors import UserError, on_command_line
import hvdtrain
hvdtrain.init(backend="single")
from hvdtrain.cli import checkpoint as module
from hvdtrain.runtime.session import current
for line in sys.stdin.read().splitlines():
    try:
        module._export(current(), module._export_parser().parse_args(line.split()))
    except UserError as error:
        print("ERROR", on_command_line(error.message))
"""


def test_export_writes_what_keras_and_numpy_load(home):
    import keras

    first = checkpoint(home, "export", "run", "--checkpoint", "best", "--to", "best.keras")
    assert first.code == 0, first.text
    lines = [
        "run",
        "run --to weights.weights.h5",
        "run/checkpoints/step-00000046 --to arrays.npz",
        "own",
        "own --model script:build --to own.keras",
        "own --to own.weights.h5",  # from here on mistakes
        "own --model script:build --to best.keras",
        "own --model script:build --to own.pkl",
        "own --model script:missing",
        "run --model script:build --to other.keras",
        "own --model builtins:dict --to other.keras",
        "own --checkpoint 5",
        "nothing",
    ]
    (home / "lines").write_text("\n".join(lines))
    command = f"{sys.executable} -c '{EXPORTS}' < lines"
    told = Job(["bash", "-c", command], cwd=home).expect().out.splitlines()
    assert told[:5] == [
        "run/step-00000060.keras",
        "weights.weights.h5",
        "arrays.npz",
        "own/step-00000008.npz",
        "own.keras",
    ]
    mistakes = [
        "Checkpoints of a script hold no model, only its weights. Received: --to own.weights.h5",
        "--to must name a new file. Received: best.keras, which exists.",
        "--to must end with .keras, .weights.h5, .npz. Received: own.pkl.",
        "has no 'missing'",
        "run is a run, whose model is known: leave out --model.",
        "--model must return a Keras model with variables: give it a keras.Input. Received: {}.",
        "The checkpoint of step 5 is not in own. It holds the steps 4, 8.",
        "There is no complete checkpoint in nothing.",
    ]
    for line, mistake in zip(told[5:], mistakes, strict=True):
        assert line.startswith("ERROR"), told
        assert mistake in line

    expected = np.load(home / "expected.npz", allow_pickle=False)
    own = keras.models.load_model(home / "own.keras", compile=False)
    for value, name in zip(own.get_weights(), expected.files, strict=True):
        assert np.array_equal(value, expected[name])
    arrays = np.load(home / "own" / "step-00000008.npz", allow_pickle=False)
    assert sorted(arrays.files) == [f"layers/{n}/{name}" for n in (0, 1) for name in ("bias", "kernel")]
    # The run's end has the same weights as model.keras, which are the averages.
    trained = keras.models.load_model(home / "run" / "model.keras", compile=False)
    newest = keras.models.load_model(home / "run" / "step-00000060.keras", compile=False)
    for one, other in zip(trained.get_weights(), newest.get_weights(), strict=True):
        assert np.array_equal(one, other)
    newest.load_weights(home / "weights.weights.h5")
    with zipfile.ZipFile(home / "best.keras") as archive:
        assert b"hvdtrain" not in archive.read("config.json")
    assert not [name for name in os.listdir(home) if name.startswith(".")]
