"""A handful of the rounds that `python -m tests.chaos` plays by the hundred."""

import subprocess
import sys

import pytest

from tests.chaos.faults import NAMES, faults_of
from tests.chaos.places import NotPossible
from tests.chaos.play import play
from tests.chaos.references import References
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
