"""Sums by host in one process: which ranks exchange with which, and whether two levels are taken."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.hierarchy import host_grid, sum_by_host
from hvdtrain.runtime.hierarchy_choice import HOROVOD_VARIABLE, choose_hierarchy, resolve_hierarchy
from hvdtrain.runtime.mesh import Mesh
from hvdtrain.runtime.world import World, host_grids
from tests.unit.threaded_exchange import Meeting, Replica, outcomes_on
from tests.unit.threaded_ranks import place


@pytest.mark.parametrize(
    ("hosts", "by_host", "crossings"),
    [
        ("aabb", ((0, 1), (2, 3)), [(0, 2), (1, 3)]),
        ("abab", ((0, 2), (1, 3)), [(0, 1), (2, 3)]),
        ("aab", ((0, 1), (2,)), [(0, 2)]),
        ("aaabbbb", ((0, 1, 2), (3, 4, 5, 6)), [(0, 3), (1, 4), (2, 5)]),
    ],
)
def test_a_bridge_of_each_host_exchanges_with_those_of_the_others(hosts, by_host, crossings):
    grid = host_grid(range(len(hosts)), hosts)
    assert (grid.hosts, grid.crossings) == (by_host, crossings)
    assert grid.process_sets() == [*(host for host in by_host if len(host) > 1), *crossings]
    last = len(hosts) - 1
    assert last in grid.host_of(last)
    assert grid.crossing_of(last) == next((ranks for ranks in crossings if last in ranks), None)


@pytest.mark.parametrize("hosts", ["a", "aaaa", "abcd"])
def test_one_host_or_one_rank_on_each_have_no_levels(hosts):
    assert host_grid(range(len(hosts)), hosts) is None


def test_groups_of_a_mesh_have_grids_of_their_own():
    mesh = Mesh.of({"tp": 2}, 0, 8)
    grids = host_grids(mesh, "aaaabbbb")
    assert {group: grid.hosts for group, grid in grids.items()} == {
        (0, 2, 4, 6): ((0, 2), (4, 6)),
        (1, 3, 5, 7): ((1, 3), (5, 7)),
    }


class Host(Replica):
    """The ranks of one host, on threads."""

    def scatter_rows(self, tensor, rows, *, name):
        brought = self._meeting.put_together(self.index, ("rows", name), tf.split(tensor, rows))
        return tf.concat([sent[self.index] for sent in brought], 0)


@pytest.mark.parametrize(("ranks", "bridges", "elements"), [(2, 2, 6), (2, 2, 7), (3, 2, 5), (3, 1, 4), (1, 1, 3)])
def test_slices_of_any_width_add_up(ranks, bridges, elements):
    meeting = Meeting(ranks)

    def summed(index):
        mine = tf.range(elements, dtype=tf.float64) + index
        # The other host holds ten times as much.
        between = (lambda slice_of_host: 11 * slice_of_host) if index < bridges else None
        return sum_by_host(mine, Host(meeting, index), bridges, between, name="x")

    for total in outcomes_on(ranks, summed):
        np.testing.assert_array_equal(total, 11 * (ranks * np.arange(elements) + sum(range(ranks))))


def test_a_shape_that_is_not_static_is_refused():
    @tf.function(input_signature=[tf.TensorSpec([None])], autograph=False)
    def summed(x):
        return sum_by_host(x, Host(Meeting(1), 0), 1, None, name="x")

    with pytest.raises(LaunchError, match="A sum by host needs a static shape"):
        summed.get_concrete_function()


# -- whether two levels are taken --


@pytest.mark.parametrize(
    ("option", "variable", "resolved"),
    [
        ("auto", None, "auto"),
        ("auto", "1", "always"),
        ("auto", "0", "never"),
        ("never", "1", "never"),
        ("always", "0", "always"),
    ],
)
def test_the_option_goes_before_horovods_variable(option, variable, resolved):
    environ = {} if variable is None else {HOROVOD_VARIABLE: variable}
    assert resolve_hierarchy(RuntimeConfig(hierarchical_allreduce=option), place(0, 4), environ) == resolved


def test_nothing_is_measured_where_runs_must_not_differ():
    config = RuntimeConfig(deterministic=True)
    assert resolve_hierarchy(config, place(0, 4), {}) == "never"
    config = replace(config, hierarchical_allreduce="always")
    assert resolve_hierarchy(config, place(0, 4), {}) == "always"


def test_an_elastic_job_sums_over_all_ranks_at_once():
    elastic = replace(place(0, 4), elastic=True)
    assert resolve_hierarchy(RuntimeConfig(), elastic, {HOROVOD_VARIABLE: "1"}) == "never"
    with pytest.raises(ConfigError, match="hierarchical_allreduce='always' does not go with elastic: it needs hosts"):
        resolve_hierarchy(RuntimeConfig(hierarchical_allreduce="always"), elastic, {})


@pytest.mark.parametrize(("choice", "said"), [("auto", False), ("never", False), ("always", True)])
def test_an_option_without_effect_is_named(choice, said):
    world = World(mesh=Mesh.of({}, 0, 4), hosts=tuple("aaaa"), collectives={"dp": SimpleNamespace(by_host=None)})
    remarks = choose_hierarchy(world, choice, ControlChannel(), 1.0).remarks
    expected = (
        "note: --hierarchical-allreduce=always has no effect: it needs several hosts, and several ranks on one of "
        "them. Received: 4 ranks on 1 host."
    )
    assert remarks == ((expected,) if said else ())
