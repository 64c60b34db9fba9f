import json
import os
import signal
import subprocess
import sys

import pytest

from hvdtrain.config.errors import CheckpointError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdtrain.checkpoint.checkpointer import Checkpointer, restore  # noqa: E402

SCALARS = {"step": 3, "epoch": 1, "seed": 0, "loss_scale": 1.0}


def variables(value=0.0):
    return {
        "model/dense/kernel": tf.Variable(tf.fill([4, 3], value)),
        "model/dense/kernel#2": tf.Variable(tf.fill([2], value)),
        "optimizer/adam/iteration": tf.Variable(int(value), dtype=tf.int64),
        "model/half": tf.Variable(tf.cast(tf.fill([2], value), tf.bfloat16)),
    }


def values(of):
    return {path: variable.numpy().tolist() for path, variable in of.items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def saved(folder):
    return Checkpointer(folder).save(3, variables(7.0), SCALARS)


# -- what is saved comes back --


def test_what_is_saved_is_restored(saved):
    fresh = variables()
    assert restore(saved, fresh) == SCALARS
    assert values(fresh) == values(variables(7.0))


def test_paths_decide_and_not_the_order(saved):
    fresh = variables()
    restore(saved, dict(reversed(fresh.items())))
    assert values(fresh) == values(variables(7.0))


def test_the_folder_appears_with_the_first_checkpoint(folder):
    checkpointer = Checkpointer(folder / "deep")
    assert not folder.exists()
    assert checkpointer.save(1, variables(), {}) == folder / "deep" / "step-00000001"


def test_the_newest_is_the_one_with_the_highest_step(folder):
    checkpointer = Checkpointer(folder, keep=9)
    for step in (100_000_000, 99_999_999, 5):
        checkpointer.save(step, variables(), {})
    assert checkpointer.newest().name == "step-100000000"


def test_the_newest_are_kept(folder):
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2, 10):
        checkpointer.save(step, variables(float(step)), {"step": step})
    assert names(folder) == ["step-00000002", "step-00000010"]
    fresh = variables()
    assert restore(checkpointer.newest(), fresh) == {"step": 10}
    assert values(fresh) == values(variables(10.0))


def test_fewer_than_are_kept_all_stay(folder):
    checkpointer = Checkpointer(folder, keep=5)
    for step in (1, 2, 3):
        checkpointer.save(step, variables(), {})
    assert len(names(folder)) == 3


def test_what_somebody_else_put_there_stays_and_is_not_restored(folder, saved):
    (folder / "step-00000003-copy").mkdir()
    (folder / "step-00000003-copy" / "manifest.json").write_text("{}")
    (folder / "step-00000009").write_text("a file")
    (folder / "notes.txt").write_text("mine")
    checkpointer = Checkpointer(folder, keep=1)
    assert checkpointer.newest() == saved
    checkpointer.save(4, variables(), {})
    assert names(folder) == ["notes.txt", "step-00000003-copy", "step-00000004", "step-00000009"]


def test_saving_over_a_step_replaces_it(folder, saved):
    assert Checkpointer(folder).save(3, variables(8.0), {"step": 3}) == saved
    fresh = variables()
    assert restore(saved, fresh) == {"step": 3}
    assert values(fresh) == values(variables(8.0))
    assert names(folder) == [saved.name]


# -- what cannot be read --


def test_there_must_be_a_checkpoint(folder):
    with pytest.raises(CheckpointError, match=f"There is no complete checkpoint in {folder}"):
        Checkpointer(folder).newest()
    folder.mkdir()
    (folder / "step-00000001").mkdir()  # no manifest in it
    with pytest.raises(CheckpointError, match="There is no complete checkpoint"):
        Checkpointer(folder).newest()


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def damage(saved, kind):
    manifest, data = saved / "manifest.json", saved / "tensors.data-00000-of-00001"
    text = json.loads(manifest.read_text())
    if kind == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif kind == "longer":
        data.write_bytes(data.read_bytes() + b"\0")
    elif kind == "a bit flipped":
        flip(data, 20)
    elif kind == "no tensors":
        data.unlink()
    elif kind == "no index":
        (saved / "tensors.index").unlink()
    elif kind == "no manifest":
        manifest.unlink()
    elif kind == "empty manifest":
        manifest.write_bytes(b"")
    elif kind == "half a manifest":
        manifest.write_text(manifest.read_text()[:50])
    elif kind == "binary manifest":
        manifest.write_bytes(b"\xff\x00")
    elif kind == "a list as manifest":
        manifest.write_text("[]")
    else:
        del text[kind.removeprefix("manifest without ")]
        manifest.write_text(json.dumps(text))


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "longer",
        "a bit flipped",
        "no tensors",
        "no index",
        "no manifest",
        "empty manifest",
        "half a manifest",
        "binary manifest",
        "a list as manifest",
        "manifest without format",
        "manifest without files",
        "manifest without tensors",
        "manifest without scalars",
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(saved, kind):
    damage(saved, kind)
    with pytest.raises(CheckpointError, match=f"The checkpoint {saved} is damaged: "):
        restore(saved, variables())


def test_a_checkpoint_of_another_format_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_text())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(CheckpointError, match=f"{saved} has format 99"):
        restore(saved, variables())


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda v: v.pop("model/half"), "model/half: saved ['bfloat16', [2]], needed nothing"),
        (lambda v: v.update(more=tf.Variable(0.0)), "more: saved nothing, needed ['float32', []]"),
        (
            lambda v: v.update({"model/half": tf.Variable([1.0, 2.0])}),
            "model/half: saved ['bfloat16', [2]], needed ['float32', [2]]",
        ),
        (
            lambda v: v.update({"model/dense/kernel": tf.Variable(tf.zeros([3, 4]))}),
            "model/dense/kernel: saved ['float32', [4, 3]], needed ['float32', [3, 4]]",
        ),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(saved, change, part):
    other = variables()
    change(other)
    before = values(other)
    with pytest.raises(CheckpointError, match=f"{saved} is of another model or optimizer") as raised:
        restore(saved, other)
    assert part in str(raised.value)
    assert values(other) == before


def test_the_first_differences_stand_for_many(folder):
    saved = Checkpointer(folder).save(1, {f"v{i}": tf.Variable(0.0) for i in range(9)}, {})
    with pytest.raises(CheckpointError, match=r"v0: .*; v1: .*; v2: .* … and 6 more\.$"):
        restore(saved, {})


# -- what cannot be written --


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_file_in_the_folders_place_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    target = file / below if below else file
    with pytest.raises(CheckpointError, match=f"The checkpoint {target}/step-00000001 cannot be written: .*{file}"):
        Checkpointer(target).save(1, variables(), {})
    assert file.read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_leaves_what_was_there(folder, saved, monkeypatch, call):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match=r"step-00000004 cannot be written: .*No space left on device"):
            Checkpointer(folder).save(4, variables(), {})
    assert names(folder) == [saved.name]
    Checkpointer(folder).save(4, variables(), {})


def test_tensorflows_own_errors_are_told_as_well(folder, monkeypatch):
    def fail(*args, **more):
        raise tf.errors.ResourceExhaustedError(None, None, "disk quota exceeded")

    monkeypatch.setattr(tf.train.Checkpoint, "write", fail)
    with pytest.raises(CheckpointError, match=r"step-00000004 cannot be written: .*disk quota exceeded"):
        Checkpointer(folder).save(4, variables(), {})
    assert names(folder) == []


def test_the_leavings_of_a_killed_writer_with_this_process_number_are_no_hindrance(folder):
    # In a container, the process that goes on with a run often has the number of the one that was killed.
    left = folder / f".step-00000004.{os.getpid()}"
    left.mkdir(parents=True)
    (left / "tensors.index").write_text("half")
    saved = Checkpointer(folder).save(4, variables(7.0), {})
    assert names(folder) == [saved.name]
    assert sorted(json.loads((saved / "manifest.json").read_text())["files"]) == names(saved)[1:]


# -- writers that are killed --

KILLED_WRITERS = """
import os, pathlib, shutil, signal, sys
import tensorflow as tf
from hvdtrain.checkpoint import checkpointer as module

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def halfway(path, *args, **more):  # the order in which rmtree goes through a folder is nobody's promise
    for name in ("tensors.data-00000-of-00001", "tensors.index"):
        pathlib.Path(path, name).unlink(missing_ok=True)
        if pathlib.Path(path, "manifest.json").exists():
            die()

def kill_at(point):
    if point == "tensors":
        module.tf.train.Checkpoint.write = die
    elif point == "manifest":
        module._write_manifest = die
    elif point == "rename":
        module.os.rename = die
    elif point == "removal":
        module.shutil.rmtree = halfway

for point in sys.argv[2:]:
    child = os.fork()  # before TensorFlow has started any thread
    if child == 0:
        folder = pathlib.Path(sys.argv[1], point)
        old = {"v": tf.Variable([1.0] * 100)}
        writer = module.Checkpointer(folder, keep=2)
        writer.save(1, old, {"step": 1})
        writer.save(2, old, {"step": 2})
        kill_at(point.removesuffix(" again"))
        writer.save(2 if point.endswith("again") else 3, {"v": tf.Variable([2.0] * 100)}, {"step": 3})
        os._exit(0)
    print(point, os.waitpid(child, 0)[1], sep=":", flush=True)
"""

POINTS = [
    f"{point}{again}"
    for again in ("", " again")  # a new step, or once more the step that is there
    for point in ("tensors", "manifest", "rename", "removal")
]


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """A folder for each point at which a writer was killed."""
    folder = tmp_path_factory.mktemp("killed")
    done = subprocess.run(
        [sys.executable, "-c", KILLED_WRITERS, str(folder), *POINTS], capture_output=True, text=True, timeout=120
    )
    ends = dict(line.split(":") for line in done.stdout.splitlines())
    assert ends == {point: str(int(signal.SIGKILL)) for point in POINTS}, done.stderr
    return folder


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_writer_leaves_only_whole_checkpoints(killed, point):
    folder = killed / point
    fresh = {"v": tf.Variable(tf.zeros([100]))}
    for path in sorted(folder.glob("step-*")):
        step = restore(path, fresh)["step"]
        assert set(fresh["v"].numpy()) == {2.0 if step == 3 else 1.0}
    newest = restore(Checkpointer(folder).newest(), fresh)["step"]
    # Killed between hiding the old and showing the new one, a writer that repeats a step leaves those before.
    assert newest in {"removal": (3,), "rename again": (1, 2), "removal again": (1, 3)}.get(point, (2,))
    # The next writer clears away what was left.
    Checkpointer(folder, keep=2).save(9, fresh, {"step": 9})
    assert len(names(folder)) == 2
    assert names(folder)[-1] == "step-00000009"
    assert not [name for name in names(folder) if name.startswith(".")]
