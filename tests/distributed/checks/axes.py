"""Collectives along the axes of a mesh, and roots that are counted within their groups, against NumPy."""

from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf
from meshes import on_mesh
from world import World
from worlds import worlds

from hvdtrain.runtime.collectives import AxisCollectives

MESHES = ("tp=2", "tp=4", "pp=2,tp=2")


def exchanged(collectives: AxisCollectives, mine: tf.Tensor, rows: tf.Tensor) -> list[tf.Tensor]:
    """Call everything that a compiled function may call along one axis."""
    pair = [mine, mine * 10.0]
    return [
        collectives.all_reduce(mine, name="all/reduce"),
        *collectives.grouped_all_reduce(pair, name="all/reduce/grouped"),
        collectives.reduce_scatter(mine, name="scattered", prescale=2.0, postscale=0.5),
        *collectives.grouped_reduce_scatter(pair, name="scattered/grouped"),
        collectives.reduce_scatter(tf.cast(mine, tf.bfloat16), name="scattered/short"),
        collectives.all_gather(rows, name="gathered"),
        *collectives.grouped_all_gather([rows, rows * 10.0], name="gathered/grouped"),
    ]


def expected(ranks: tuple[int, ...], index: int) -> list[np.ndarray]:
    """Return what `exchanged` comes to, by NumPy alone."""
    total = sum(matrix(rank, len(ranks)) for rank in ranks)
    mine = np.array_split(total, len(ranks))[index]
    gathered = np.concatenate([rows_of(rank) for rank in ranks])
    return [total, total, total * 10, mine, mine, mine * 10, mine, gathered, gathered, gathered * 10]


def matrix(rank: int, ranks: int) -> np.ndarray:
    """Rows that do not divide among the ranks, and of which each rank's are others."""
    return np.arange(3 * (2 * ranks + 1), dtype="float32").reshape(-1, 3) + 8.0 * rank


def rows_of(rank: int) -> np.ndarray:
    return np.full((rank + 1, 2), float(rank), "float32")


def along_all(there: Any, inputs: Any) -> Any:
    return {axis: exchanged(there.along(axis), *tensors) for axis, tensors in inputs.items()}


@worlds("gloo-4", "mpirun-4", extended=True, why="groups within a group take four ranks")
def check_each_axis_exchanges_by_itself(world: World) -> None:
    """All axes at once in one compiled function, whose ops no order ties together, and eagerly; bytes, too."""
    for axes in MESHES:
        with on_mesh(world, axes) as mesh:
            there, me = mesh.session.world, mesh.session.world.rank
            sizes = {axis: there.mesh.size(axis) for axis in there.mesh.axis_names}
            inputs = {axis: (tf.constant(matrix(me, n)), tf.constant(rows_of(me))) for axis, n in sizes.items()}
            eagerly = partial(along_all, there)
            compiled = tf.function(eagerly, autograph=False)
            for results in (compiled(inputs), compiled(inputs), eagerly(inputs)):
                for axis, found in results.items():
                    ranks = there.mesh.ranks_along(axis)
                    for tensor, right in zip(found, expected(ranks, ranks.index(me)), strict=True):
                        np.testing.assert_array_equal(tf.cast(tensor, tf.float32), right, err_msg=f"{axis} of {axes}")
            for axis in sizes:
                ranks = there.mesh.ranks_along(axis)
                found = mesh.session.gather(b"%d" % me, mesh.timeout, ranks)
                assert found == [b"%d" % rank for rank in ranks], (axes, axis)
                for root in {0, len(ranks) - 1}:
                    variables = {
                        "number": tf.Variable([float(me)] * 3),
                        "short": tf.Variable(tf.cast([me], tf.bfloat16)),
                        "flag": tf.Variable([me == ranks[root]]),
                    }
                    there.along(axis).broadcast(variables, root=root)
                    assert variables["number"].numpy().tolist() == [float(ranks[root])] * 3, (axes, axis, root)
                    assert float(variables["short"][0]) == ranks[root]
                    assert bool(variables["flag"][0])
