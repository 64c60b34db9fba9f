import hashlib
import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import safetensors.numpy

from hvdtrain.config.errors import CheckpointError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")


from hvdtrain.backends.single import NoOpCollectives  # noqa: E402
from hvdtrain.checkpoint import index as indexes  # noqa: E402
from hvdtrain.checkpoint import pending  # noqa: E402
from hvdtrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from hvdtrain.checkpoint.pending import PendingCheckpoint  # noqa: E402
from hvdtrain.checkpoint.restore import restore as restored  # noqa: E402
from hvdtrain.checkpoint.tensor_files import SliceReader  # noqa: E402
from hvdtrain.runtime.placement import whole_box  # noqa: E402
from hvdtrain.state.named_tensors import replicated_tensor  # noqa: E402
from tests.extended import mostly_extended  # noqa: E402

SCALARS = {"step": 3, "epoch": 1, "seed": 0}


def restore(path, of):
    return restored(path, named(of), NoOpCollectives())


def named(of):
    return {path: replicated_tensor(variable) for path, variable in of.items()}


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
    return Checkpointer(folder).save(3, named(variables(7.0)), SCALARS)


# -- what is saved comes back --


def test_what_is_saved_is_restored(saved):
    fresh = variables()
    assert restore(saved, fresh) == SCALARS
    assert values(fresh) == values(variables(7.0))


def test_the_newest_is_the_one_with_the_highest_step(folder):
    checkpointer = Checkpointer(folder, keep=9)
    for step in (100_000_000, 99_999_999, 5):
        checkpointer.save(step, named(variables()), {})
    assert checkpointer.find().name == "step-100000000"


def test_the_newest_are_kept(folder):
    checkpointer = Checkpointer(folder, keep=2)
    for step in (1, 2, 10):
        checkpointer.save(step, named(variables(float(step))), {"step": step})
    assert names(folder) == ["step-00000002", "step-00000010"]
    fresh = variables()
    assert restore(checkpointer.find(), fresh) == {"step": 10}
    assert values(fresh) == values(variables(10.0))


def test_what_somebody_else_put_there_stays_and_is_not_restored(folder, saved):
    (folder / "step-00000003-copy").mkdir()
    (folder / "step-00000003-copy" / "index.json").write_text("{}")
    (folder / "step-00000009").write_text("a file")
    (folder / "notes.txt").write_text("mine")
    checkpointer = Checkpointer(folder, keep=1)
    assert checkpointer.find() == saved
    checkpointer.save(4, named(variables()), {})
    assert names(folder) == ["notes.txt", "step-00000003-copy", "step-00000004", "step-00000009"]


def test_saving_over_a_step_replaces_it(folder, saved):
    assert Checkpointer(folder).save(3, named(variables(8.0)), {"step": 3}) == saved
    fresh = variables()
    assert restore(saved, fresh) == {"step": 3}
    assert values(fresh) == values(variables(8.0))
    assert names(folder) == [saved.name]


# -- what cannot be read --


def test_there_must_be_a_checkpoint(folder):
    with pytest.raises(CheckpointError, match=f"There is no complete checkpoint in {folder}"):
        Checkpointer(folder).find()
    folder.mkdir()
    (folder / "step-00000001").mkdir()  # no index in it
    with pytest.raises(CheckpointError, match="There is no complete checkpoint"):
        Checkpointer(folder).find()


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def damage(saved, kind):
    index, data = saved / "index.json", saved / "tensors-00000.safetensors"
    text = json.loads(index.read_text())
    if kind == "truncated":
        data.write_bytes(data.read_bytes()[:-1])
    elif kind == "longer":
        data.write_bytes(data.read_bytes() + b"\0")
    elif kind == "a bit flipped":
        flip(data, -20)
    elif kind == "a bit of the header flipped":
        flip(data, 20)
    elif kind == "no tensors":
        data.unlink()
    elif kind == "a bit of a count flipped":
        index.write_text(index.read_text().replace('"step": 3', '"step": 4'))
    elif kind == "no index":
        index.unlink()
    elif kind == "empty index":
        index.write_bytes(b"")
    elif kind == "half an index":
        index.write_text(index.read_text()[:50])
    elif kind == "binary index":
        index.write_bytes(b"\xff\x00")
    elif kind == "a list as index":
        index.write_text("[]")
    else:
        del text[kind.removeprefix("index without ")]
        index.write_text(json.dumps(text))


@pytest.mark.parametrize(
    "kind",
    [
        "truncated",
        "longer",
        "a bit flipped",
        "a bit of the header flipped",
        "no tensors",
        "a bit of a count flipped",
        "no index",
        "empty index",
        "half an index",
        "binary index",
        "a list as index",
        "index without format",
        "index without files",
        "index without tensors",
        "index without scalars",
    ],
)
def test_a_damaged_checkpoint_is_refused_by_name(saved, kind):
    damage(saved, kind)
    with pytest.raises(CheckpointError, match=f"The checkpoint {saved} is damaged: "):
        restore(saved, variables())


def test_a_checkpoint_of_another_format_is_refused(saved):
    index = json.loads((saved / "index.json").read_text())
    (saved / "index.json").write_text(json.dumps({**index, "format": 99}))
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


# -- what cannot be written --


@pytest.mark.parametrize("below", ["", "checkpoints"])
def test_a_file_in_the_folders_place_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    target = file / below if below else file
    with pytest.raises(CheckpointError, match=f"The checkpoint {target}/step-00000001 cannot be written: .*{file}"):
        Checkpointer(target).save(1, named(variables()), {})
    assert file.read_text() == "mine"


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fails_leaves_what_was_there(folder, saved, monkeypatch, call):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match=r"step-00000004 cannot be written: .*No space left on device"):
            Checkpointer(folder).save(4, named(variables()), {})
    assert names(folder) == [saved.name]
    Checkpointer(folder).save(4, named(variables()), {})


def test_the_leavings_of_killed_writers_are_cleared_away(folder):
    left = folder / f".step-00000004.{os.getpid()}"
    left.mkdir(parents=True)
    (left / "tensors-00000.safetensors").write_text("half")
    saved = Checkpointer(folder).save(4, named(variables(7.0)), {})
    assert names(folder) == [saved.name]
    assert names(saved) == ["index.json", *json.loads((saved / "index.json").read_text())["files"]]


def test_a_draft_that_somebody_writes_is_not_cleared_away(folder):
    draft = PendingCheckpoint(final=folder / "step-00000004", rank=0)
    draft.create()
    (draft.path / "tensors-00000.safetensors").write_text("half")
    Checkpointer(folder, keep=1).save(5, named(variables()), {})
    assert names(folder) == [draft.path.name, f"{draft.path.name}.lock", "step-00000005"]
    assert names(draft.path) == ["tensors-00000.safetensors"]
    draft._lock.release()  # as the system does for a process that is gone
    Checkpointer(folder, keep=1).save(6, named(variables()), {})
    assert names(folder) == ["step-00000006"]


def test_a_failure_keeps_the_only_checkpoint(folder, saved, monkeypatch):
    def fail(*args, **more):
        raise OSError(28, "No space left on device")

    for module, call in ((pending, "write_tensors"), (pending, "commit"), (os, "rename"), (os, "fsync")):
        for step in (3, 4):
            with monkeypatch.context() as patch:
                patch.setattr(module, call, fail)
                with pytest.raises(CheckpointError, match="No space left on device"):
                    Checkpointer(folder, keep=1).save(step, named(variables()), {})
            assert names(folder) == [saved.name]
    fresh = variables()
    assert restore(Checkpointer(folder).find(), fresh) == SCALARS
    assert values(fresh) == values(variables(7.0))


def test_the_checkpoint_that_was_just_written_stays_beside_later_steps(folder):
    checkpointer = Checkpointer(folder, keep=1)
    checkpointer.save(9, named(variables()), {})
    assert checkpointer.save(4, named(variables()), {}).is_dir()


# -- what is in it --


def test_all_kinds_of_tensors_come_back_bit_by_bit(folder):
    tensors = {
        "bfloat16": tf.Variable(tf.cast([[1.5, -0.0], [float("nan"), 3.0]], tf.bfloat16)),
        "float16": tf.Variable(tf.cast([1.5, float("inf")], tf.float16)),
        "float64": tf.Variable(tf.constant([0.1], tf.float64)),
        "bool": tf.Variable([True, False, True]),
        "int64": tf.Variable(tf.constant(2**62, tf.int64)),
        "uint32": tf.Variable(tf.constant([2**32 - 1, 5], tf.uint32)),
        "scalar": tf.Variable(-3.25),
        "empty": tf.Variable(tf.zeros([0, 3])),
        "a/b c.d": tf.Variable(tf.reshape(tf.range(24.0), [2, 3, 4])),
    }
    path = Checkpointer(folder).save(1, named(tensors), {})
    fresh = {name: tf.Variable(tf.zeros_like(tensor)) for name, tensor in tensors.items()}
    restore(path, fresh)
    for name, tensor in tensors.items():
        assert fresh[name].dtype == tensor.dtype
        assert fresh[name].numpy().tobytes() == tensor.numpy().tobytes(), name


class Held:
    """Values of a dtype for which TensorFlow has no kernels on a CPU."""

    def __init__(self, array):
        self._array, self.dtype, self.shape = array, array.dtype, array.shape

    def numpy(self):
        return self._array


BITS = np.random.default_rng(0).integers(0, 256, 24 * 16, np.uint8)


@pytest.mark.parametrize("dtype", sorted(indexes._DTYPES))
def test_every_dtype_of_numbers_comes_back_bit_by_bit(folder, dtype):
    kind = indexes.numpy_dtype(dtype)
    bits = BITS % 2 if dtype == "bool" else BITS
    flat = bits.view(kind)[:24]
    arrays = {"v": flat.reshape(2, 3, 4), "scalar": flat[:1].reshape(()), "empty": flat[:0].reshape(0, 3)}
    path = Checkpointer(folder).save(1, named({name: Held(array) for name, array in arrays.items()}), {})
    reader = SliceReader(path)
    for name, array in arrays.items():
        found = reader.read(name, array.shape, whole_box(array.shape))
        assert (found.dtype, found.shape, found.tobytes()) == (kind, array.shape, array.tobytes())
    part = reader.read("v", (2, 3, 4), (slice(1, 2), slice(0, 3), slice(1, 3)))
    assert part.tobytes() == arrays["v"][1:2, :, 1:3].tobytes()
    with safetensors.safe_open(path / "tensors-00000.safetensors", framework="np") as file:
        stored = file.get_tensor("v")
        assert stored.dtype == kind or (stored.dtype == np.uint8 and file.metadata()["v"] == dtype)
        assert stored.tobytes() == arrays["v"].tobytes()


def test_tensors_of_strings_are_refused_by_name(folder):
    with pytest.raises(CheckpointError, match=r"checkpoints hold numbers\. Received: model/words of dtype string\."):
        Checkpointer(folder).save(1, named({"model/words": tf.Variable(["a", "b"])}), {})
    assert names(folder) == []


def test_a_file_is_what_safetensors_would_write(folder):
    tensors = {"a": tf.Variable([1.0, 2.0]), "b": tf.Variable([[3.0]]), "c": tf.Variable([True])}
    path = Checkpointer(folder).save(1, named(tensors), {})
    values = {name: variable.numpy() for name, variable in tensors.items()}
    ours, theirs = (path / "tensors-00000.safetensors").read_bytes(), safetensors.numpy.save(values, metadata={})
    headers = [int.from_bytes(data[:8], "little") for data in (ours, theirs)]
    assert json.loads(ours[8 : 8 + headers[0]]) == json.loads(theirs[8 : 8 + headers[1]])
    assert ours[8 + headers[0] :] == theirs[8 + headers[1] :]
    assert headers[0] % 8 == 0, "tensors are aligned in the file"


def test_the_index_has_shapes_slices_and_checksums(saved):
    content = json.loads((saved / "index.json").read_text())
    kernel = content["tensors"]["model/dense/kernel"]
    assert (kernel["dtype"], kernel["global_shape"]) == ("float32", [4, 3])
    (part,) = kernel["slices"]
    assert (part["bounds"], part["name"]) == ([[0, 4], [0, 3]], "model/dense/kernel")
    with safetensors.safe_open(saved / part["file"], framework="np") as file:
        assert hashlib.sha256(file.get_tensor(part["name"]).tobytes()).hexdigest() == part["sha256"]
    assert content["files"] == {"tensors-00000.safetensors": (saved / "tensors-00000.safetensors").stat().st_size}


@pytest.mark.parametrize(("stored", "needed"), [([24], [2, 3, 4]), ([2, 3, 4], [24]), ([1], []), ([], [1])])
def test_a_flat_tensor_is_restored_in_its_shape_and_the_other_way_round(folder, stored, needed):
    count = int(tf.reduce_prod(tf.constant(stored, tf.int32)))
    path = Checkpointer(folder).save(1, named({"v": tf.Variable(tf.reshape(tf.range(float(count)), stored))}), {})
    fresh = {"v": tf.Variable(tf.zeros(needed) - 1)}
    restore(path, fresh)
    assert fresh["v"].numpy().reshape(-1).tolist() == list(range(count))


# -- writers that are killed --

KILLED_WRITERS = """
import os, pathlib, shutil, signal, sys
import tensorflow as tf
from hvdtrain.checkpoint import checkpointer as module
from hvdtrain.checkpoint import commit, tensor_files
from hvdtrain.state.named_tensors import replicated_tensor

def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)

def halfway(path, *args, **more):  # the order in which rmtree goes through a folder is nobody's promise
    for name in ("tensors-00000.safetensors",):
        pathlib.Path(path, name).unlink(missing_ok=True)
    die()

def at_call(function, number):
    def counted(*args, **more):
        nonlocal number
        number -= 1
        return function(*args, **more) if number >= 0 else die()
    return counted

def kill_at(point):
    if point == "tensors":
        tensor_files.os.fsync = die
    elif point == "index":
        commit.index.encode = die
    elif point == "rename":
        os.rename = die
    elif point == "second rename":
        os.rename = at_call(os.rename, 1)
    elif point == "removal":
        shutil.rmtree = halfway

for point in sys.argv[2:]:
    child = os.fork()  # before TensorFlow has started any thread
    if child == 0:
        folder = pathlib.Path(sys.argv[1], point)
        old = {"v": replicated_tensor(tf.Variable([1.0] * 100))}
        writer = module.Checkpointer(folder, keep=int(point[-1]))
        writer.save(1, old, {"saved as": 1})
        writer.save(2, old, {"saved as": 2})
        kill_at(point[:-2].removesuffix(" again"))
        new = {"v": replicated_tensor(tf.Variable([2.0] * 100))}
        writer.save(2 if "again" in point else 3, new, {"saved as": 3})
        os._exit(0)
    print(point, os.waitpid(child, 0)[1], sep=":", flush=True)
"""

POINTS = [
    f"{point}{again} {keep}"
    for keep in (1, 2)
    for again in ("", " again")  # a new step, or once more the step that is there
    for point in ("tensors", "index", "rename", "second rename", "removal")
    # A new step takes nobody's place, and of two the first goes only with the third.
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


@pytest.mark.parametrize(
    "point",
    mostly_extended(
        POINTS, lambda point: "second" in point or point == "index 2", why="the writer commits by one rename"
    ),
)
def test_a_killed_writer_leaves_only_whole_checkpoints(killed, point):
    folder = killed / point
    fresh = {"v": tf.Variable(tf.zeros([100]))}
    for path in sorted(folder.glob("step-*")):
        saved_as = restore(path, fresh)["saved as"]
        assert set(fresh["v"].numpy()) == {2.0 if saved_as == 3 else 1.0}
    newest = restore(Checkpointer(folder).find(), fresh)["saved as"]
    # Only what comes after the new checkpoint has its name can find it.
    assert newest == (3 if point.startswith(("removal", "second rename 1", "second rename 2")) else 2)
    # The next writer clears away what was left.
    Checkpointer(folder, keep=1).save(9, named(fresh), {"step": 9})
    assert names(folder) == ["step-00000009"]
