import numpy as np
import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.mesh import Mesh


@pytest.mark.parametrize("rank", range(4))
def test_data_parallel_makes_every_rank_a_replica(rank):
    mesh = Mesh.data_parallel(rank, 4)
    assert (mesh.size("dp"), mesh.coordinate("dp"), mesh.ranks_along("dp")) == (4, rank, (0, 1, 2, 3))


def test_one_process_is_a_mesh():
    mesh = Mesh.data_parallel(0, 1)
    assert (mesh.size("dp"), mesh.coordinate("dp"), mesh.ranks_along("dp")) == (1, 0, (0,))


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


def test_the_groups_of_an_axis_hold_each_rank_once():
    groups = {Mesh(("dp", "tp"), (2, 3), rank).ranks_along("dp") for rank in range(6)}
    assert sorted(rank for group in groups for rank in group) == list(range(6))


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_the_mesh_is_refused(rank):
    with pytest.raises(LaunchError, match=rf"Rank {rank} lies outside a mesh of 4 ranks"):
        Mesh.data_parallel(rank, 4)


def test_every_axis_needs_a_size():
    with pytest.raises(LaunchError, match=r"one size for each axis.*'tp'.*\(2,\)"):
        Mesh(("dp", "tp"), (2,), 0)


@pytest.mark.parametrize("question", ["size", "coordinate", "ranks_along"])
def test_an_unknown_axis_is_named_with_those_there_are(question):
    with pytest.raises(LaunchError, match=r"no axis 'tp'\. Available: dp"):
        getattr(Mesh.data_parallel(0, 2), question)("tp")
