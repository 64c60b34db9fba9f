"""The hash of a model whose parts are on several ranks, here on threads."""

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.runtime.placement import whole_box
from hvdtrain.state.hashes import digest_of, digest_of_parts
from hvdtrain.state.named_tensors import NamedTensor
from tests.unit.gathering import Gathering, on_ranks

SIZE = 2
WHOLE = {
    "model/cut": np.arange(24, dtype="float32").reshape(4, 6) - 7.5,
    "model/flat": np.arange(12, dtype="float64").reshape(3, 4),
    "model/tied": np.array([-0.0, 1.0, np.inf], "float16"),
    "model/last": np.array([[5]], "int64"),
    "model/empty": np.zeros((0, 3), "float32"),
}


class Rank(Gathering):
    """Adds up integers, too."""

    @property
    def rank(self):
        return self.index

    @property
    def everyone(self):
        return self

    def all_reduce(self, mine, *, name):
        assert mine.dtype == tf.int32, "a sum of floats loses the sign of a zero"

        def total(array):
            everyone = self.gather_bytes(array.tobytes(), timeout=None)
            return np.sum([np.frombuffer(each, np.int32) for each in everyone], 0, np.int32)

        return tf.ensure_shape(tf.numpy_function(total, [mine], tf.int32), mine.shape)


def part(path, *box):
    whole = WHOLE[path]
    box = box or whole_box(whole.shape)
    return NamedTensor(tf.Variable(whole[box]), whole.shape, box, replicated=True)


def parts_of(rank):
    """Columns of one tensor, rows of another with padding behind them or flat, one on both ranks, one on the last."""
    columns = slice(3 * rank, 3 * rank + 3)
    rows = slice(2 * rank, min(2 * rank + 2, 3))
    mine = WHOLE["model/flat"][rows]
    held = np.pad(mine, [(0, 2 - len(mine)), (0, 0)], constant_values=9.0) if rank else mine.reshape(-1)
    parts = {
        "model/cut": part("model/cut", slice(0, 4), columns),
        "model/flat": NamedTensor(tf.Variable(held), (3, 4), (rows, slice(0, 4)), replicated=False),
        "model/tied": part("model/tied"),
        "model/empty": part("model/empty"),
    }
    return parts | ({"model/last": part("model/last")} if rank else {})


def digests(parts):
    return on_ranks(SIZE, lambda backend: digest_of_parts(parts(backend.rank), backend, timeout=1.0), Rank)


def test_it_is_that_of_the_whole_on_every_rank():
    assert digests(parts_of) == [digest_of(WHOLE)] * SIZE


@pytest.mark.parametrize("path", ["model/cut", "model/flat", "model/last"])
def test_it_notices_a_part_of_any_rank(path):
    def changed(rank):
        parts = parts_of(rank)
        if rank == 1:
            value = parts[path].value
            value.assign(tf.concat([value[:1] + 1, value[1:]], 0))
        return parts

    assert digests(changed)[0] != digest_of(WHOLE)
