"""Checkpoints of sharded tensors, written and read by any number of ranks (threads of this process)."""

import json
import shutil

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.checkpoint.checkpointer import Checkpointer
from hvdtrain.checkpoint.restore import restore
from hvdtrain.config.errors import CheckpointError
from hvdtrain.runtime.placement import Ranges, box_shape
from hvdtrain.state.named_tensors import NamedTensor, replicated_tensor, values_in
from tests.unit.gathering import Gathering, on_ranks

FILES = [f"tensors-{rank:05d}.safetensors" for rank in range(2)]
WHOLE = {
    "flat": np.arange(10, dtype="float32"),
    "rows": np.arange(7 * 3, dtype="float64").reshape(7, 3),
    "columns": np.arange(4 * 6, dtype="int64").reshape(4, 6),
    "alike": np.arange(5, dtype="float32"),
}


class Rank(Gathering):
    """One that broadcasts as well."""

    def broadcast(self, tensors, *, root=0, among="replicas"):
        for path, variable in tensors.items():
            mine = variable.numpy()
            brought = self.gather_bytes(json.dumps([path, *mine.shape]).encode() + b"|" + mine.tobytes(), timeout=None)
            heads = {message.split(b"|", 1)[0] for message in brought}
            assert len(heads) == 1, "the ranks broadcast different tensors"
            variable.assign(np.frombuffer(brought[root].split(b"|", 1)[1], mine.dtype).reshape(mine.shape))


def with_ranks(size, body):
    outcomes = on_ranks(size, lambda each: body(Rank(each.index, size, each._barrier, each.brought)))
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return outcomes


def cut(length, rank, size):
    """The rank's part of a dim: pieces of one length, of which the last ones may be short or empty."""
    piece = -(-length // size)
    return slice(min(length, rank * piece), min(length, (rank + 1) * piece)), piece


def sharded(rank, size, *, filled, flat_columns=False):
    """Return the tensors of a rank: its slices, padded to one length on all ranks."""
    whole = {name: value if filled else np.full_like(value, -1) for name, value in WHOLE.items()}
    if flat_columns:
        whole["columns"] = whole["columns"].reshape(-1)
    tensors = {"alike": replicated_tensor(tf.Variable(whole.pop("alike")))}
    for name, value in whole.items():
        dim = 1 if name == "columns" and not flat_columns else 0
        part, piece = cut(value.shape[dim], rank, size)
        box = tuple(part if d == dim else slice(0, n) for d, n in enumerate(value.shape))
        shape = [piece if d == dim else n for d, n in enumerate(value.shape)]
        held = np.full(shape, 77, value.dtype)
        held[tuple(slice(0, n) for n in box_shape(box))] = value[box]
        tensors[name] = NamedTensor(tf.Variable(held), value.shape, box, replicated=False)
    return tensors


def check(tensors):
    for name, tensor in tensors.items():
        expected = WHOLE[name].reshape(tensor.global_shape)[tensor.slice]
        held = tensor.value.numpy()
        inner = tuple(slice(0, n) for n in expected.shape)
        np.testing.assert_array_equal(held[inner], expected)
        held[inner] = 0
        assert not held.any(), "padding comes back as zeros"


def save(folder, size, **more):
    def body(ranks):
        return Checkpointer(folder, backend=ranks).save(3, sharded(ranks.index, size, filled=True), {"step": 3}, **more)

    return with_ranks(size, body)[0]


@pytest.mark.parametrize("written_by", [1, 2, 4, 12])
@pytest.mark.parametrize("read_by", [1, 2, 3, 4])
def test_any_number_of_ranks_reads_what_any_number_wrote(tmp_path, written_by, read_by):
    path = save(tmp_path, written_by)

    def body(ranks):
        for flat in (False, True):
            tensors = sharded(ranks.index, read_by, filled=False, flat_columns=flat)
            assert restore(path, tensors, ranks) == {"step": 3}
            check(tensors)

    with_ranks(read_by, body)


BLOCKS = {0: 12, 12: 6, 18: 6}
"""Lengths by the first column."""
FUSED = {"kernel": np.arange(5 * 24, dtype="float64").reshape(5, 24), "bias": np.arange(24, dtype="float32")}


def fused(rank, size, *, filled):
    """Return a rank's slices of three blocks of different lengths."""
    tensors = {}
    for name, value in FUSED.items():
        own = Ranges(
            tuple(slice(begin + rank * n // size, begin + (rank + 1) * n // size) for begin, n in BLOCKS.items())
        )
        region = (*(slice(0, n) for n in value.shape[:-1]), own)
        held = values_in(value, region)
        variable = tf.Variable(held if filled else np.zeros_like(held))
        tensors[name] = NamedTensor(variable, value.shape, region, replicated=False)
    return tensors


@pytest.mark.parametrize(("written_by", "read_by"), [(1, 2), (2, 1), (2, 3), (6, 2), (2, 2)])
def test_slices_of_several_blocks_are_read_by_any_number_of_ranks(tmp_path, written_by, read_by):
    def write(ranks):
        tensors = fused(ranks.index, written_by, filled=True)
        return Checkpointer(tmp_path, backend=ranks).save(3, tensors, {"step": 3})

    path = with_ranks(written_by, write)[0]

    def body(ranks):
        for seen in (path, path if ranks.index == 0 else tmp_path / "elsewhere"):
            tensors = fused(ranks.index, read_by, filled=False)
            restore(seen, tensors, ranks)
            for name, tensor in tensors.items():
                np.testing.assert_array_equal(tensor.value.numpy(), values_in(FUSED[name], tensor.slice))

    with_ranks(read_by, body)
    content = json.loads((path / "index.json").read_text())["tensors"]["kernel"]
    assert content["global_shape"] == [5, 24]
    assert len(content["slices"]) == 3 * written_by
    whole = {name: replicated_tensor(tf.Variable(np.zeros_like(value))) for name, value in FUSED.items()}
    with_ranks(1, lambda ranks: restore(path, whole, ranks))
    for name, value in FUSED.items():
        np.testing.assert_array_equal(whole[name].value.numpy(), value)


def test_each_rank_writes_what_it_holds_and_the_primary_what_all_hold(tmp_path):
    path = save(tmp_path, 2)
    content = json.loads((path / "index.json").read_text())
    assert sorted(content["files"]) == FILES
    files = {name: [part["file"][8:13] for part in tensor["slices"]] for name, tensor in content["tensors"].items()}
    assert files == {"alike": ["00000"], **{name: ["00000", "00001"] for name in ("flat", "rows", "columns")}}
    assert [part["bounds"] for part in content["tensors"]["rows"]["slices"]] == [[[0, 4], [0, 3]], [[4, 7], [0, 3]]]


def test_a_rank_that_cannot_see_the_files_is_sent_its_slices(tmp_path):
    path = save(tmp_path, 3)

    def body(ranks):
        tensors = sharded(ranks.index, 2, filled=False)
        restore(path if ranks.index == 0 else tmp_path / "elsewhere", tensors, ranks)
        check(tensors)

    with_ranks(2, body)


@pytest.mark.parametrize("stale", [1, 2])
def test_a_checkpoint_of_that_name_from_another_run_is_not_mixed_in(tmp_path, stale):
    path = save(tmp_path / "shared", 3)

    def leave_behind(ranks):
        tensors = sharded(ranks.index, 3, filled=True)
        for tensor in tensors.values():
            tensor.value.assign(tf.zeros_like(tensor.value))
        Checkpointer(tmp_path / "own", backend=ranks).save(3, tensors, {"step": 3})

    with_ranks(3, leave_behind)

    def body(ranks):
        tensors = sharded(ranks.index, 3, filled=False)
        seen = tmp_path / "own" / path.name if ranks.index == stale else path
        assert restore(seen, tensors, ranks) == {"step": 3}
        check(tensors)

    with_ranks(3, body)


def test_whole_tensors_need_a_folder_on_the_primary_only(tmp_path):
    (tmp_path / "file").write_text("no folder can be made below it")

    def body(ranks):
        folder = tmp_path / "mine" if ranks.index == 0 else tmp_path / "file" / "none"
        checkpoints = Checkpointer(folder, backend=ranks)
        tensors = {"v": replicated_tensor(tf.Variable([float(ranks.index + 1)]))}
        checkpoints.save(1, tensors, {"step": 1})
        tensors["v"].value.assign([9.0])
        restore(checkpoints.find(), tensors, ranks)
        assert tensors["v"].value.numpy() == [1.0]

    with_ranks(3, body)


def test_slices_in_folders_of_their_own_are_refused(tmp_path):
    def body(ranks):
        tensors = sharded(ranks.index, 2, filled=True)
        draft = Checkpointer(tmp_path, backend=ranks)
        begin = draft._begin

        def begin_elsewhere(*arguments):
            pending = begin(*arguments)
            pending.path = elsewhere
            return pending

        if ranks.index:
            draft._begin = begin_elsewhere
        draft.save(1, tensors, {})

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with pytest.raises(
        CheckpointError, match=r"tensors-00001\.safetensors was written by another rank and is not in .*share"
    ):
        with_ranks(2, body)
    assert [path.name for path in tmp_path.iterdir()] == ["elsewhere"]


def test_a_rank_that_cannot_write_fails_the_checkpoint_on_all(tmp_path, monkeypatch):
    def body(ranks):
        tensors = sharded(ranks.index, 2, filled=True)
        if ranks.index == 1:
            tensors["rows"] = tensors["rows"]._replace(value=Unreadable(tensors["rows"].value))
        try:
            Checkpointer(tmp_path / "folder", backend=ranks).save(1, tensors, {})
        except CheckpointError as error:
            return str(error)

    first, second = with_ranks(2, body)
    assert "cannot be written: No space left on device" in second
    assert first == f"rank 1: {second}"
    assert not list((tmp_path / "folder").iterdir())


class Unreadable:
    def __init__(self, variable):
        self.dtype, self.shape = variable.dtype, variable.shape

    def numpy(self):
        raise OSError("No space left on device")


@pytest.mark.parametrize(("part", "held"), [(slice(6, 10), 9), (slice(4, 9), 10), (slice(0, 5), 5)])
def test_slices_with_gaps_are_refused(tmp_path, part, held):
    def body(ranks):
        tensor = sharded(ranks.index, 2, filled=True)["flat"]
        if ranks.index:
            tensor = tensor._replace(slice=(part,), value=tf.Variable(tf.zeros([part.stop - part.start])))
        Checkpointer(tmp_path, backend=ranks).save(1, {"flat": tensor}, {})

    with pytest.raises(CheckpointError, match=f"Of flat the ranks hold {held} of 10 elements together"):
        with_ranks(2, body)


def test_a_damaged_slice_is_named_on_every_rank(tmp_path):
    path = save(tmp_path, 2)
    file = path / "tensors-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))

    def body(ranks):
        try:
            restore(path, sharded(ranks.index, 2, filled=False), ranks)
        except CheckpointError as error:
            return str(error)

    first, second = with_ranks(2, body)
    assert "in tensors-00001.safetensors the bytes of flat are not those that were written" in second
    assert first == f"rank 1: {second}"
    shutil.rmtree(path)
