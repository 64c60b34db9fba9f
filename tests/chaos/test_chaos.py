"""A handful of the rounds that `python -m tests.chaos` plays by the hundred."""

import subprocess
import sys

import pytest

from tests.chaos.faults import NAMES, faults_of
from tests.chaos.matrix import Cell, Played, cells, matrix_table
from tests.chaos.places import NotPossible
from tests.chaos.play import play
from tests.chaos.references import References
from tests.chaos.report import table
from tests.chaos.rounds import WORLDS, draw

ROUNDS = [
    ("corrupt", "gloo:2", 2),
    ("SIGSEGV", "mpirun:2", 2),
    ("inf-rollback", "gloo:2", 1),
    ("disk-full", "mpirun:2", 5),
    ("os._exit", "elastic:2", 2),
]
"""Fault, world and seed; those of the same script are compared with the same training, which nothing strikes."""
pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("chaos")]  # they share a reference


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    pytest.importorskip("horovod", reason="horovod is not installed")
    return References(tmp_path_factory.mktemp("references"))


@pytest.mark.parametrize(("fault", "world", "seed"), ROUNDS, ids=[f"{fault}-{world}" for fault, world, _ in ROUNDS])
def test_a_training_that_is_struck_ends_and_goes_on_to_the_same_parameters(references, tmp_path, fault, world, seed):
    try:
        outcome = play(draw(seed, [fault], [world]), references, tmp_path / "round")
    except NotPossible as why:
        pytest.skip(str(why))
    assert not outcome.problems, f"{outcome.problems} {outcome.round.command}\n{outcome.text}"


def test_a_round_is_drawn_from_its_seed_alone():
    drawn = [draw(seed, NAMES, WORLDS) for seed in range(300)]
    assert {(each.world, each.fault) for each in drawn} == {
        (world, name) for world in WORLDS for name in faults_of(world)
    }
    assert {(each.world, each.rank) for each in drawn} == {(world, rank) for world in WORLDS for rank in (0, 1)}
    assert [draw(each.seed, [each.fault], [each.world]) for each in drawn] == drawn


def test_a_fault_that_can_strike_no_world_is_refused():
    words = [sys.executable, "-m", "tests.chaos", "--faults", "host-added", "--worlds", "mpirun:2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "none of these faults can strike any of these worlds" in done.stderr


def test_the_table_has_a_row_for_each_fault_and_world():
    rows = [
        ("SIGKILL", "gloo:2", 0.5, []),
        ("SIGKILL", "gloo:2", 1.5, ["other parameters"]),
        ("inf", "mpirun:2", None, []),
    ]
    names = ("fault", "world", "ended_s", "problems")
    records = [dict(zip(names, row, strict=True), detected_s=None, lost=3) for row in rows]
    assert table(records).splitlines()[2:] == [
        "| SIGKILL | gloo:2 | 2 | 1 | - | 1 (1.5) | 3 (3) |",
        "| inf | mpirun:2 | 1 | 1 | - | - | 3 (3) |",
        "| all |  | 3 | 2 | - | 1 (1.5) | 3 (3) |",
    ]


def test_the_matrix_has_a_cell_for_each_fault_rank_and_controller():
    assert len(cells()) == 10 * 2 * 2
    good, bad = Cell("SIGKILL", 0, "gloo"), Cell("SIGKILL", 0, "mpirun")
    played = [Played(good, 137, 0.11, 0.2), Played(bad, 1, None, 9.0, problems=["ended with code 1, not 137"])]
    assert matrix_table(played).splitlines() == [
        "| seconds found / ended, code | gloo, rank 0 | mpirun, rank 0 |",
        "|---|---|---|",
        "| SIGKILL | 0.1 / 0.2, 137 | - / 9.0, 1 **wrong** |",
    ]
