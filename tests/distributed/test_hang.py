"""Jobs that hang end, with the names of the ranks that hold them up; slow ones do not."""

import functools
import re

import pytest

from tests.chaos.matrix import SCRIPT, Cell, play_cell
from tests.launching import Job, launched

pytestmark = pytest.mark.xdist_group("hang")  # one process starts the jobs that these tests look at
WELL_S = 6.0
"""The timeout of the job that is not to be ended: a busy machine keeps ranks waiting for seconds."""
HANG_TIMEOUT_S = 15.0
"""Of jobs that are to be ended: on a busy machine, ranks that start may stand still for seconds."""
PATIENCE_S = 60.0
"""Other tests run beside these; `python -m tests.chaos --matrix` measures how long it takes."""
LOOP, C_CODE = Cell("endless loop", 1, "mpirun"), Cell("C code", 1, "gloo")
CELLS = [
    C_CODE,
    Cell("SIGSTOP", 0, "mpirun"),
    Cell("blocked reader", 0, "mpirun"),
    Cell("extra collective", 1, "gloo"),
    Cell("other branches", 0, "gloo"),
    Cell("sys.exit(0)", 1, "mpirun"),
]
"""Beside LOOP, those of `python -m tests.chaos --matrix` that stand for the others, and what it does not show."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("horovod", reason="horovod is not installed")
    return tmp_path_factory.mktemp("hang")


@pytest.fixture(scope="module")
def played(folder):
    """Return a function that starts the job of a cell, once, and tells how it ended."""
    return functools.cache(
        functools.partial(play_cell, folder=folder, hang_timeout_s=HANG_TIMEOUT_S, patience_s=PATIENCE_S)
    )


# Half a minute: until the ranks train, and the timeout of a hang.
@pytest.mark.parametrize(
    "cell",
    [LOOP, *(pytest.param(cell, marks=pytest.mark.extended) for cell in CELLS)],
    ids=lambda cell: f"{cell.name}-{cell.rank}-{cell.controller}",
)
def test_a_job_that_hangs_ends(played, cell):
    outcome = played(cell)
    assert not outcome.problems, f"{outcome.problems}\n{outcome.text}"


def test_every_live_rank_shows_where_it_stands(played):
    text = played(LOOP).text
    stacks = {rank: text.partition(f"rank {rank} stands at")[2].partition("hvdtrain: rank")[0] for rank in (0, 1)}
    assert "quick_execute" in stacks[0], text
    assert re.search(r"faulty_script.py\", line \d+, in loops", stacks[1]), text


@pytest.mark.extended
def test_a_rank_in_c_code_shows_it_too(played):
    text = played(C_CODE).text
    assert re.search(r"faulty_script.py\", line \d+ in holds_the_lock", text), text


@pytest.mark.extended
def test_ranks_that_take_long_are_waited_for(folder):
    command = launched("mpirun", 2, str(SCRIPT), "is_slow_but_well", "1", str(WELL_S))
    outcome = Job(command, cwd=folder).expect(timeout=300)
    assert outcome.out.split().count("well") == 2, outcome.text
    assert "hangs" not in outcome.text
    waits = r"rank 0 \(\S+\) waits in .* while rank 1 \(\S+\) is (loading data at step 13|in callbacks at step 3)"
    assert re.search(waits, outcome.text)
