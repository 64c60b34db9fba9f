"""How a script of the user's own ends on one rank, and what becomes of the others."""

import re
from pathlib import Path

import pytest

from tests.launching import Job, launched

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).with_name("user_script.py")
BOTH = ("gloo", "mpirun")


def launch(controller, ending, tmp_path):
    pytest.importorskip("horovod", reason="horovod is not installed")
    return Job(launched(controller, 2, str(SCRIPT), ending), cwd=tmp_path).expect(code=None)


@pytest.mark.parametrize("controller", BOTH)
def test_a_rank_that_exits_ends_the_job_with_its_code(controller, tmp_path):
    outcome = launch(controller, "one_exits", tmp_path)
    assert outcome.code == 3, outcome.text
    assert re.search(r"error: The script called sys\.exit\(3\) at \S+user_script\.py:\d+\. \[rank 1", outcome.text)
    assert "rank 0" not in outcome.text, outcome.text


def test_ranks_that_exit_alike_end_the_job_with_their_code(tmp_path):
    outcome = launch("mpirun", "all_exit", tmp_path)
    assert outcome.code == 1, outcome.text
    assert outcome.text.count("The script called sys.exit(1)") == 1, outcome.text


def test_a_good_exit_is_none_that_ends_the_job(tmp_path):
    outcome = launch("mpirun", "well", tmp_path)
    assert outcome.code == 0, outcome.text
    assert "went on" in outcome.text
    assert outcome.text.count("initialized False") == 2


@pytest.mark.parametrize("ending", ["one_leaves_unclearly", "all_leave_unclearly"])
def test_an_exit_whose_code_cannot_be_seen_waits_for_ranks_that_still_work(ending, tmp_path):
    outcome = launch("mpirun", ending, tmp_path)
    assert outcome.code == 0, outcome.text
    assert "saved" in outcome.text
    assert not re.search(r"rank \d \(\S+\) failed", outcome.text), outcome.text  # TensorFlow's calls of CUDA may fail


def test_a_rank_that_never_comes_to_a_barrier_is_named(tmp_path):
    outcome = launch("mpirun", "never_comes", tmp_path)
    assert outcome.code == 2, outcome.text
    assert "hvdtrain.barrier(): No message from rank 1 of 2 within 2 s" in outcome.text, outcome.text


@pytest.mark.parametrize("controller", BOTH)
def test_the_cause_is_shown_where_a_peer_is_cut_off_long_before(controller, tmp_path):
    outcome = launch(controller, "shuts_down_first", tmp_path)
    assert outcome.code == 1, outcome.text
    assert re.search(r"rank 1 \(\S+\) failed:", outcome.text), outcome.text
    assert outcome.text.count("ValueError: the cause") == 1, outcome.text
    assert "rank 0" not in outcome.text, outcome.text


def test_who_waits_at_the_end_leaves_at_once_when_another_fails(tmp_path):
    outcome = launch("mpirun", "fails_while_saving", tmp_path)
    assert outcome.code == 1, outcome.text
    assert "OSError: no space left on the disk" in outcome.text
    assert "No message from" not in outcome.text
