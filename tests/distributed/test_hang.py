"""Jobs that hang end, with the names of the ranks that hold them up; slow ones do not."""

import re
import sys

import pytest

from tests.chaos.matrix import SCRIPT, Cell, play_cell
from tests.launching import launcher, run

pytestmark = pytest.mark.xdist_group("hang")  # one process starts the jobs that these tests look at
WELL_S = 6.0
"""The timeout of the job that is not to be ended: a busy machine keeps ranks waiting for seconds."""
CELLS = [
    Cell("endless loop", 1, "mpirun"),
    Cell("C code", 1, "gloo"),
    Cell("SIGSTOP", 0, "mpirun"),
    Cell("blocked reader", 0, "mpirun"),
    Cell("extra collective", 1, "gloo"),
    Cell("other branches", 0, "gloo"),
    Cell("sys.exit(0)", 1, "mpirun"),
]
"""Those of `python -m tests.chaos --matrix` that stand for the others, and what it does not show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("horovod", reason="horovod is not installed")
    return tmp_path_factory.mktemp("hang")


@pytest.fixture(scope="module")
def played(folder):
    """How each job ended, and when; one at a time, since ranks that wait for a core look as if they hung."""
    return {cell.name: play_cell(cell, folder) for cell in CELLS}


@pytest.mark.parametrize("cell", CELLS, ids=[f"{each.name}-{each.rank}-{each.controller}" for each in CELLS])
def test_a_job_that_hangs_ends(played, cell):
    outcome = played[cell.name]
    assert not outcome.problems, f"{outcome.problems}\n{outcome.text}"


def test_every_live_rank_shows_where_it_stands(played):
    text = played["endless loop"].text
    stacks = {rank: text.partition(f"rank {rank} stands at")[2].partition("hvdtrain: rank")[0] for rank in (0, 1)}
    assert "quick_execute" in stacks[0], text
    assert re.search(r"faulty_script.py\", line \d+, in loops", stacks[1]), text


def test_a_rank_in_c_code_shows_it_too(played):
    text = played["C code"].text
    assert re.search(r"faulty_script.py\", line \d+ in holds_the_lock", text), text


def test_ranks_that_take_long_are_waited_for(folder):
    command = [*launcher("mpirun", 2), sys.executable, str(SCRIPT), "is_slow_but_well", "1", str(WELL_S)]
    outcome = run(command, cwd=folder, timeout=300)
    assert outcome.code == 0, outcome.text
    assert outcome.out.split().count("well") == 2, outcome.text
    assert "hangs" not in outcome.text
    waits = r"rank 0 \(\S+\) waits in .* while rank 1 \(\S+\) is (loading data at step 13|in callbacks at step 3)"
    assert re.search(waits, outcome.text)
