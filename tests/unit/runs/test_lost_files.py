"""A run whose folder is removed, or can no longer be written, while it trains."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import hvdtrain
from hvdtrain.backends.single import NoOpCollectives
from hvdtrain.checkpoint.lock import locked
from hvdtrain.checkpoint.naming import complete
from hvdtrain.checkpoint.tensor_files import SliceReader
from hvdtrain.cli.train import parse
from hvdtrain.config.errors import CheckpointError
from hvdtrain.observability.jsonl import read_metrics
from hvdtrain.runs.run import train
from tests.unit.checkpoint.test_lock import HOLDER

LOST = """\
    import glob
    import os
    import shutil

    import keras
    import numpy as np

    class Batches(keras.utils.PyDataset):
        def __init__(self, run, part, replaced, steps):
            super().__init__()
            self.replaced = replaced
            self.run, self.steps, self.removed = run, steps, False
            self.lost = os.path.join(run, part) if part else run

        def __len__(self):
            return self.steps

        def __getitem__(self, place):
            if not self.removed and glob.glob(f"{self.run}/checkpoints/step-*"):
                self.removed = True
                self.remove()
                while self.replaced and not os.path.isfile(self.lost):
                    try:
                        open(self.lost, "w").close()
                    except IsADirectoryError:  # training was faster, and made it again
                        self.remove()
            x = np.random.default_rng(place).random((16, 4), "float32")
            return x, x.argmax(axis=1)

        def remove(self):
            os.rename(self.lost, self.lost + "-moved")  # at once
            shutil.rmtree(self.lost + "-moved")

    def build(run, part, replaced=False):
        return Batches(run, part, replaced, 30), Batches("nowhere", "", False, 2)

    build.classes = ["north", "east", "south", "west"]
"""
NOBODY = 65534


@pytest.fixture
def run_that_loses(session, tmp_path, monkeypatch):
    """Train a run that loses a part of its folder, or all of it, after its first checkpoint, and return the folder."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "losing.py").write_text(textwrap.dedent(LOST))

    def losing(part, replaced=False):
        folder = tmp_path / "run"
        arguments = ["run", str(folder), "part", part, "replaced", str(replaced)]
        words = ["--data", "losing:build", "--data-args", *arguments, "--model", "mlp", "--batch", "16"]
        words += ["--model-args", "depth", "1", "width", "8", "--plots", "False", "--epochs", "2"]
        words += ["--checkpoint-every", "5", "--log-every", "5", "--run-dir", str(folder)]
        keras.utils.clear_session(free_memory=False)
        train(session, parse(words).config, folder)
        return folder

    yield losing
    sys.modules.pop("losing", None)


def test_a_run_folder_that_is_removed_is_written_again(run_that_loses, capsys):
    folder = run_that_loses("")
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl was removed. It is written anew, without the records from before.") == 1, said
    assert said.count("config.yaml, env.json, preprocessing.json of the run folder") == 1, said
    assert [path.name for path in complete(folder / "checkpoints")][-1] == "step-00000060"
    for path in complete(folder / "checkpoints"):
        SliceReader(path).verify()
    steps = [record["step"] for record in read_metrics(folder / "metrics.jsonl") if record["kind"] == "step"]
    assert steps[-2:] == [55, 60]
    assert json.loads((folder / "summary.json").read_text())["steps"] == 60
    assert {"config.yaml", "env.json", "model.keras", "preprocessing.json"} <= set(os.listdir(folder))
    assert not (folder / ".lock").exists()
    assert all(list((folder / "tensorboard" / kind).iterdir()) for kind in ("train", "validation"))


@pytest.mark.extended
def test_checkpoints_that_are_removed_are_followed_by_others(run_that_loses):
    folder = run_that_loses("checkpoints")
    assert complete(folder / "checkpoints")[-1].name == "step-00000060"
    assert "config.yaml" in os.listdir(folder)


@pytest.mark.extended
def test_a_file_in_place_of_the_run_folder_is_an_error_only_at_the_end(run_that_loses, capsys):
    with pytest.raises(CheckpointError, match=r"step-00000060 cannot be written: \[Errno 17\] File exists"):
        run_that_loses("", replaced=True)
    said = capsys.readouterr().err
    assert said.count("Records are missing from it, and training goes on.") == 1, said
    assert said.count("step-00000055 cannot be written: [Errno 17] File exists") == 1, said


def test_a_folder_that_another_job_has_taken_is_left_to_it(tmp_path):
    folder = tmp_path / "run"
    with locked(folder, NoOpCollectives()) as lock:
        lock.renew()
        shutil.rmtree(folder)
        lock.renew()
        assert (folder / ".lock").exists()
        shutil.rmtree(folder)
        command = [sys.executable, "-c", HOLDER, str(folder)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout.readline() == "holds\n"
            for _ in range(2):
                with pytest.raises(CheckpointError, match=f"to which process {other.pid} on "):
                    lock.renew()
            lock.release()
            assert (folder / ".lock").exists(), "it is the other job's"
            other.kill()
        lock.acquire()


def test_records_are_not_written_to_another_runs_file(tmp_path, capsys):
    from hvdtrain.observability.jsonl import JsonlWriter
    from tests.builders import run_info

    file = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(file)
    writer.on_start(run_info())
    file.unlink()
    file.write_text("of another run\n")
    for _ in range(2):
        writer._write({"kind": "step", "step": 1})
    assert file.read_text() == "of another run\n"
    assert capsys.readouterr().err.count("cannot be written: another file is in its place") == 1


@pytest.fixture
def unprivileged():
    """A folder of a user who is not root, as whom this process writes: root may write everywhere."""
    root = Path(tempfile.mkdtemp())
    if os.geteuid() == 0:
        os.chown(root, NOBODY, NOBODY)
        os.seteuid(NOBODY)
        try:
            yield root
        finally:
            os.seteuid(0)
    else:
        yield root
    os.chmod(root, 0o700)
    shutil.rmtree(root)


@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("ends_well", [True, False])
def test_training_goes_on_where_a_folder_becomes_read_only(unprivileged, capsys, ends_well):
    class ReadOnly(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                deadline = time.monotonic() + 30
                while not complete(unprivileged) and time.monotonic() < deadline:
                    time.sleep(0.01)
                os.chmod(unprivileged, 0o555)
            if batch == 9 and ends_well:
                os.chmod(unprivileged, 0o755)

    x = np.ones((64, 3), "float32")
    trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), "sgd", "mse")
    saves = hvdtrain.Checkpoint(unprivileged, every=4, keep=9)
    fit = {"batch": 4, "checkpoint": saves, "callbacks": [ReadOnly()], "verbose": 0}
    if ends_well:
        trainer.fit(x, x[:, :1], **fit)
    else:
        with pytest.raises(CheckpointError, match=r"step-00000016 cannot be written: \[Errno 13\] Permission denied"):
            trainer.fit(x, x[:, :1], **fit)
    said = capsys.readouterr().err
    first = "step-00000008 cannot be written: [Errno 13] Permission denied"
    assert said.count(first) == 1, said
    assert said.count("Existing checkpoints stay, and training continues.") == 1 + (not ends_well), said
    assert [path.name[-2:] for path in complete(unprivileged)] == (["04", "12", "16"] if ends_well else ["04"])


def test_closed_streams_are_given_to_nobody(tmp_path):
    script = "import hvdtrain, os, sys; print('seen by nobody'); sys.stderr.write('nor this')\n"
    script += "open('links', 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    command = f'exec {sys.executable} -c "{script}" <&- >&- 2>&-'
    assert subprocess.run(["bash", "-c", command], cwd=tmp_path, timeout=60, check=False).returncode == 0
    assert (tmp_path / "links").read_text().split() == ["/dev/null"] * 3
