"""One rank of the launches of test_world_launch.py: three worlds, one after another, with other meshes each."""

import warnings
from dataclasses import replace

import numpy as np
import tensorflow as tf

from hvdtrain.config.parallel import parse_axes
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.collectives import AxisCollectives
from hvdtrain.runtime.link import open_link
from hvdtrain.runtime.session import Session, open_session
from hvdtrain.runtime.world import World, open_world

TIMEOUT_S = 60.0
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


def check_tensors(world: World) -> None:
    """All axes at once in one compiled function, whose ops no order ties together."""
    sizes = {axis: world.mesh.size(axis) for axis in world.mesh.axis_names}
    inputs = {axis: (tf.constant(matrix(world.rank, n)), tf.constant(rows_of(world.rank))) for axis, n in sizes.items()}

    @tf.function(autograph=False)
    def along_all(inputs):
        return {axis: exchanged(world.along(axis), *tensors) for axis, tensors in inputs.items()}

    for results in (along_all(inputs), along_all(inputs), along_all.python_function(inputs)):
        for axis, found in results.items():
            ranks = world.mesh.ranks_along(axis)
            for tensor, right in zip(found, expected(ranks, ranks.index(world.rank)), strict=True):
                np.testing.assert_array_equal(tf.cast(tensor, tf.float32), right, err_msg=f"along {axis}")


def check_roots(world: World) -> None:
    """A root is counted within its group: each of several groups has one of its own."""
    for axis in world.mesh.axis_names:
        ranks = world.mesh.ranks_along(axis)
        for root in {0, len(ranks) - 1}:
            variables = {
                "number": tf.Variable([float(world.rank)] * 3),
                "short": tf.Variable(tf.cast([world.rank], tf.bfloat16)),
                "flag": tf.Variable([world.rank == ranks[root]]),
            }
            world.along(axis).broadcast(variables, root=root)
            assert variables["number"].numpy().tolist() == [float(ranks[root])] * 3, (axis, root)
            assert float(variables["short"][0]) == ranks[root]
            assert bool(variables["flag"][0])


def check_bytes(session: Session) -> None:
    world = session.world
    for axis in world.mesh.axis_names:
        found = session.gather(b"%d" % world.rank, TIMEOUT_S, world.mesh.ranks_along(axis))
        assert found == [b"%d" % rank for rank in world.mesh.ranks_along(axis)], axis


def check(session: Session, generation: int) -> None:
    world = session.world
    assert world.generation == generation
    assert world.primary == (world.rank == 0)
    assert len(world.hosts) == world.size == session.environment.size
    session.control.post("generation", b"%d" % generation)
    check_tensors(world)
    check_roots(world)
    check_bytes(session)
    assert session.control.read("generation") == dict.fromkeys(range(world.size), b"%d" % generation)


def main() -> None:
    session = open_session(open_link(timeout=TIMEOUT_S), RuntimeConfig(parallel=MESHES[0]))
    check(session, 0)
    for generation, parallel in enumerate(MESHES[1:], start=1):
        session.close()
        link = open_link(timeout=TIMEOUT_S, generation=generation)
        axes = parse_axes(parallel)
        world = open_world(link.control, link.environment, session.world.hosts, axes=axes, generation=generation)
        session = replace(session, link=link, world=world)
        check(session, generation)
    session.close()
    print(f"rank {session.environment.rank}: {len(MESHES)} worlds", flush=True)


if __name__ == "__main__":
    warnings.simplefilter("error", category=UserWarning)
    main()
