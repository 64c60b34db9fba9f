import numpy as np
import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.config.parallel import USER_AXES
from hvdtrain.runtime.mesh import Mesh, process_sets_of


@pytest.mark.parametrize("rank", range(4))
def test_data_parallel_makes_every_rank_a_replica(rank):
    mesh = Mesh.data_parallel(rank, 4)
    assert (mesh.size("dp"), mesh.coordinate("dp"), mesh.ranks_along("dp")) == (4, rank, (0, 1, 2, 3))


def test_the_last_axis_holds_neighbouring_ranks():
    mesh = Mesh(("dp", "tp"), (3, 2), rank=3)
    assert (mesh.coordinate("dp"), mesh.coordinate("tp")) == (1, 1)
    assert mesh.ranks_along("tp") == (2, 3)
    assert mesh.ranks_along("dp") == (1, 3, 5)


def test_coordinates_of_all_ranks_fill_the_grid():
    names, shape = ("pp", "dp", "tp"), (2, 3, 4)
    meshes = [Mesh(names, shape, rank) for rank in range(24)]
    coordinates = [tuple(mesh.coordinate(name) for name in names) for mesh in meshes]
    assert coordinates == list(np.ndindex(shape))
    for mesh in meshes:
        for name in names:
            along = mesh.ranks_along(name)
            assert len(along) == mesh.size(name)
            assert along[mesh.coordinate(name)] == mesh.rank


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(LaunchError, match=rf"Rank {rank} lies outside a mesh of 4 ranks"):
        Mesh.data_parallel(rank, 4)


def test_every_axis_needs_a_size():
    with pytest.raises(LaunchError, match=r"one size for each axis.*'tp'.*\(2,\)"):
        Mesh(("dp", "tp"), (2,), 0)


@pytest.mark.parametrize("question", ["size", "coordinate", "ranks_along"])
def test_an_unknown_axis_is_named_with_those_there_are(question):
    with pytest.raises(LaunchError, match=r"no axis 'sp' of a mesh\. Available: pp, dp, cp, ep, tp"):
        getattr(Mesh.data_parallel(0, 2), question)("sp")


def test_an_axis_that_is_not_named_holds_one_rank():
    mesh = Mesh.data_parallel(1, 2)
    assert (mesh.size("tp"), mesh.coordinate("tp"), mesh.ranks_along("tp")) == (1, 0, (1,))
    assert mesh.named(("dp", "tp")) == ("dp",)


def test_several_axes_together_are_the_ranks_that_differ_along_any_of_them():
    mesh = Mesh.of({"pp": 2, "ep": 2, "tp": 2}, 13, 16)
    assert mesh.shape == (2, 2, 2, 2)
    assert mesh.ranks_along("dp", "ep") == mesh.ranks_along("ep", "dp") == (9, 11, 13, 15)
    assert (mesh.size("dp", "ep"), mesh.coordinate("dp", "ep")) == (4, 2)
    assert mesh.ranks_along("pp", "dp", "cp", "ep", "tp") == tuple(range(16))


def test_the_stages_of_a_pipeline_have_a_pair_with_each_neighbour_and_the_first_with_the_last():
    assert Mesh.of({"pp": 3, "dp": 2}, 0, 6).neighbours("pp") == [(0, 2), (2, 4), (0, 4), (1, 3), (3, 5), (1, 5)]
    assert Mesh.of({"pp": 2, "tp": 2}, 0, 4).neighbours("pp") == [(0, 2), (1, 3)]
    assert Mesh.of({"tp": 2}, 0, 4).neighbours("pp") == []


@pytest.mark.parametrize(
    ("axes", "size", "names", "shape"),
    [
        ({}, 3, ("dp",), (3,)),
        ({"tp": 2}, 8, ("dp", "tp"), (4, 2)),
        ({"tp": 2, "pp": 2, "ep": 1}, 8, ("pp", "dp", "ep", "tp"), (2, 2, 1, 2)),
        ({"tp": 4}, 4, ("dp", "tp"), (1, 4)),
        ({"tp": 2, "dp": 3}, 6, ("dp", "tp"), (3, 2)),
        ({"tp": 2, "dp": -1}, 6, ("dp", "tp"), (3, 2)),
        ({"tp": -1, "dp": 2}, 8, ("dp", "tp"), (2, 4)),
        ({"cp": -1, "pp": 2}, 8, ("pp", "dp", "cp"), (2, 1, 4)),
    ],
)
def test_a_mesh_of_sizes_fills_dp_with_the_ranks_that_are_left(axes, size, names, shape):
    mesh = Mesh.of(axes, size - 1, size)
    assert (mesh.axis_names, mesh.shape) == (names, shape)


@pytest.mark.parametrize(
    ("axes", "size", "cause"),
    [
        ({"tp": 2, "pp": 3}, 8, r"8 ranks cannot be laid out as pp 3 x tp 2: start a multiple of 6"),
        ({"tp": 8}, 4, r"4 ranks cannot be laid out as tp 8: start a multiple of 8"),
        ({"dp": 2, "tp": 2}, 8, r"8 ranks cannot be laid out as dp 2 x tp 2: start 4"),
        ({"tp": 0}, 4, r"The tp axis must hold at least 1 rank\. Received: 0"),
        ({"sp": 2}, 4, r"no axis 'sp' of a mesh\. Available: pp, dp, cp, ep, tp"),
        ({"tp": 3, "cp": -1}, 8, r"8 ranks cannot be laid out as tp 3: start a multiple of 3"),
    ],
)
def test_sizes_that_do_not_fit_the_ranks_are_refused(axes, size, cause):
    with pytest.raises(LaunchError, match=cause):
        Mesh.of(axes, 0, size)


@pytest.mark.parametrize(
    ("axes", "size", "sets"),
    [
        ({}, 4, []),  # the world's own set is Horovod's global one
        ({}, 1, []),
        ({"tp": 2}, 4, [(0, 2), (1, 3), (0, 1), (2, 3)]),
        ({"tp": 4}, 4, []),
        ({"tp": 2, "ep": 1}, 4, [(0, 2), (1, 3), (0, 1), (2, 3)]),
        ({"tp": 2}, 2, []),
    ],
)
def test_each_group_needs_one_process_set_unless_it_is_the_world_or_one_rank(axes, size, sets):
    assert all(process_sets_of(Mesh.of(axes, rank, size)) == sets for rank in range(size))


def test_all_ranks_plan_the_same_process_sets_and_each_finds_its_own():
    meshes = [Mesh.of({"pp": 2, "tp": 3}, rank, 24) for rank in range(24)]
    sets = process_sets_of(meshes[0])
    assert all(process_sets_of(mesh) == sets for mesh in meshes)
    assert len(set(sets)) == len(sets) == 24 // 2 + 24 // 4 + 24 // 3 + 24 // 8
    assert meshes[7].ranks_along(*USER_AXES) in sets, "ranks of all stages and replicas with one slice along tp"
    assert all(mesh.ranks_along(axis) in sets for mesh in meshes for axis in mesh.axis_names)
