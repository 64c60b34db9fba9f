"""Damaged and hostile checkpoints, which of them a training goes on from, and which stay."""

import json
import os
import pickle
import re

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed")

from hvdtrain.checkpoint import index as indexes  # noqa: E402
from hvdtrain.checkpoint.checkpointer import Checkpointer  # noqa: E402
from hvdtrain.checkpoint.selection import Retention, find_checkpoint  # noqa: E402
from hvdtrain.checkpoint.tensor_files import SliceReader  # noqa: E402
from hvdtrain.config.errors import CheckpointError  # noqa: E402
from hvdtrain.state.named_tensors import replicated_tensor  # noqa: E402

STEPS = (2, 4, 6)


def tensors(value):
    return {"model/v": replicated_tensor(tf.Variable(tf.fill([300], float(value))))}


@pytest.fixture
def folder(tmp_path):
    for step in STEPS:
        Checkpointer(tmp_path).save(step, tensors(step), {"step": step, "epoch": step // 2})
    return tmp_path


def at(folder, step):
    return folder / f"step-{step:08d}"


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def swap(one, other):
    spare = one.with_name("spare")
    one.rename(spare)
    other.rename(one)
    spare.rename(other)


DATA, INDEX = "tensors-00000.safetensors", "index.json"
FAULTS = {
    "truncated": lambda path: os.truncate(path / DATA, 600),
    "empty": lambda path: os.truncate(path / DATA, 0),
    "a bit flipped": lambda path: flip(path / DATA, -777),
    "a bit of the index flipped": lambda path: flip(path / INDEX, 40),
    "half deleted": lambda path: (path / DATA).unlink(),
    "index gone": lambda path: (path / INDEX).unlink(),
    "an empty folder": lambda path: [file.unlink() for file in path.iterdir()],
    "data of another": lambda path: swap(path / DATA, at(path.parent, 4) / DATA),
    "index of another": lambda path: swap(path / INDEX, at(path.parent, 4) / INDEX),
    "names exchanged": lambda path: swap(path, at(path.parent, 4)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_newest_good_one_is_used_and_damaged_ones_are_named_and_set_aside(folder, capsys, fault):
    FAULTS[fault](at(folder, 6))
    exchanged = "another" in fault or "exchanged" in fault  # then the fourth step's is damaged as well
    good = 2 if exchanged else 4
    assert find_checkpoint(folder) == at(folder, good)
    assert sorted(path.name for path in folder.iterdir()) == [at(folder, step).name for step in STEPS]
    assert "It is passed over." in capsys.readouterr().err
    assert Checkpointer(folder).find_to_go_on() == at(folder, good)
    told = capsys.readouterr().err
    assert f"hvdtrain: warning: The checkpoint {at(folder, 6)} is damaged: " in told
    for line in told.splitlines():
        assert line.count("is damaged") == 1
        assert not re.search(r"Error|Errno|\.\.", line), line
    assert "It is set aside as step-00000006.damaged." in told
    assert (at(folder, 4).name in told) == exchanged
    aside = [f"{at(folder, step).name}.damaged" for step in STEPS if step > good]
    left = [at(folder, step).name for step in STEPS if step <= good]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*left, *aside])
    # The training comes to that step again.
    Checkpointer(folder).save(6, tensors(6), {"step": 6})
    assert Checkpointer(folder).find_to_go_on() == at(folder, 6)
    flip(at(folder, 6) / DATA, -3)
    Checkpointer(folder).find_to_go_on()
    assert (folder / "step-00000006.damaged2").is_dir()


def test_where_all_are_damaged_nothing_starts_anew(folder, capsys):
    for step in STEPS:
        flip(at(folder, step) / DATA, -1)
    with pytest.raises(CheckpointError, match="There is no complete checkpoint in"):
        find_checkpoint(folder)
    capsys.readouterr()
    for _ in range(2):  # the next attempt, as of a scheduler, starts nothing anew either
        with pytest.raises(CheckpointError, match=r"damaged are step-00000006, step-00000004, step-00000002\..* rm -r"):
            Checkpointer(folder).find_to_go_on()
        assert capsys.readouterr().err.count("passed over") == len(STEPS)
    assert sorted(path.name for path in folder.iterdir()) == [at(folder, step).name for step in STEPS]


def test_a_folder_with_a_first_draft_alone_has_nothing_to_go_on_from(folder):
    for step in STEPS:  # hidden, as the draft of a save that was interrupted
        at(folder, step).rename(folder / f".{at(folder, step).name}.draft")
    assert Checkpointer(folder).find_to_go_on() is None


@pytest.mark.parametrize("which", ["best", "4"])
def test_a_damaged_one_that_is_asked_for_by_name_is_refused(folder, which):
    Checkpointer(folder).save(8, tensors(8), {"step": 8, "best": {"step": 4}})
    flip(at(folder, 4) / DATA, -1)
    with pytest.raises(CheckpointError, match=f"{at(folder, 4)} is damaged: in {DATA} the bytes of model/v are not"):
        find_checkpoint(folder, which)


def test_the_best_is_found_where_the_newest_is_damaged(folder):
    Checkpointer(folder).save(8, tensors(8), {"step": 8, "best": {"step": 4}})
    Checkpointer(folder, keep=9).save(9, tensors(9), {"step": 9})
    (at(folder, 9) / INDEX).unlink()
    assert find_checkpoint(folder, "best") == at(folder, 4)


# -- a hostile file --


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


def forged(path, change):
    """Change a index and give it a checksum that fits, as anybody can."""
    content = json.loads((path / INDEX).read_text())
    del content["checksum"]
    change(content)
    content["checksum"] = indexes._checksum(content)
    (path / INDEX).write_text(json.dumps(content))


def change_slice(**values):
    return lambda content: content["tensors"]["model/v"]["slices"][0].update(values)


FORGERIES = {
    "a file outside": lambda content: (
        content["files"].update({"../../secret": 1200}),
        change_slice(file="../../secret")(content),
    ),
    "an absolute file": lambda content: (
        content["files"].update({"/etc/passwd": 1200}),
        change_slice(file="/etc/passwd")(content),
    ),
    "a file that is not listed": change_slice(file="other.bin"),
    "objects": lambda content: content["tensors"]["model/v"].update(dtype="object"),
    "a dtype of fields": lambda content: content["tensors"]["model/v"].update(dtype="O,O"),
    "a dtype of TensorFlow's": lambda content: content["tensors"]["model/v"].update(dtype="resource"),
    "more than the file holds": lambda content: (
        content["tensors"]["model/v"].update(global_shape=[10**12]),
        change_slice(bounds=[[0, 10**12]])(content),
    ),
    "a name that is not there": change_slice(name="model/w"),
    "an unknown field": change_slice(offset=-1200),
    "bounds outside": change_slice(bounds=[[-300, 0]]),
    "a gap": change_slice(bounds=[[0, 299]]),
    "no list of slices": lambda content: content["tensors"].update({"model/v": 5}),
    "a list of files": lambda content: content.update(files=[DATA]),
    "a format of text": lambda content: content.update(format="__import__"),
    "scalars of text": lambda content: content.update(scalars="os.system"),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_a_forged_index_is_refused(folder, forgery):
    forged(at(folder, 6), FORGERIES[forgery])
    with pytest.raises(CheckpointError, match=rf"{at(folder, 6)} is damaged: "):
        SliceReader(at(folder, 6)).verify()
    assert find_checkpoint(folder) == at(folder, 4)


@pytest.mark.parametrize("name", [DATA, INDEX])
def test_a_pickle_in_place_of_a_file_is_never_loaded(folder, name):
    mark = folder / "mark"
    assert pickle.loads(pickle.dumps(Payload(mark))) == 0
    mark.unlink()  # the payload works, where it is unpickled
    (at(folder, 6) / name).write_bytes(pickle.dumps(Payload(mark)))
    np.save(at(folder, 6) / "more.npy", np.array([Payload(mark)], object), allow_pickle=True)
    assert find_checkpoint(folder) == at(folder, 4)
    assert not mark.exists()


def test_a_index_that_is_too_deep_is_refused(folder):
    (at(folder, 6) / INDEX).write_text("[" * 100_000)
    assert find_checkpoint(folder) == at(folder, 4)


# -- what stays --


def test_one_of_every_so_many_hours_stays_beside_the_newest(tmp_path):
    saved = {step: minute * 60.0 for step, minute in {1: 0, 2: 59, 3: 60, 4: 90, 5: 119, 6: 121, 7: 130}.items()}
    for step, seconds in saved.items():
        Checkpointer(tmp_path, keep=None).save(step, tensors(step), {"step": step})
        forged(at(tmp_path, step), lambda content, seconds=seconds: content.update(saved_at=1e9 + seconds))
    paths = [at(tmp_path, step) for step in saved]
    gone = [int(path.name[-1]) for path in Retention(2, 1.0).superfluous(paths)]
    assert gone == [2, 4, 5], "the first, 60 and 121 minutes; and the two newest"
    left = [path for path in paths if int(path.name[-1]) not in gone]
    assert Retention(2, 1.0).superfluous(left) == [], "what has stayed stays"
    assert [int(path.name[-1]) for path in Retention(2).superfluous(paths)] == [1, 2, 3, 4, 5]
    Checkpointer(tmp_path, keep=1, keep_every_hours=1.0).save(8, tensors(8), {"step": 8})
    assert sorted(int(path.name[-1]) for path in tmp_path.iterdir()) == [1, 3, 6, 8]
