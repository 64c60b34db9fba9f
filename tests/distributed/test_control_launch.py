"""The control channel between real processes, over both controllers."""

import re
from pathlib import Path

import pytest

from tests.launching import Job, launched

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).with_name("control_script.py")
TIMEOUT_S = 90


@pytest.fixture(params=[("gloo", "horovod"), ("mpirun", "mpi4py")], ids=["gloo", "mpi"])
def launch(request, tmp_path):
    """Return a function that runs the script in one mode on three ranks."""
    controller, module = request.param
    pytest.importorskip(module, reason=f"{module} is not installed")
    command = launched(controller, 3, str(SCRIPT))
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "HVDTRAIN_JOB_SECRET": ""}
    return lambda mode: Job([*command, mode], cwd=tmp_path, **environ).expect(code=None, timeout=TIMEOUT_S)


def test_ranks_talk_to_one_another(launch):
    outcome = launch("checks")
    assert outcome.code == 0, outcome.text
    for rank in range(3):
        assert re.search(rf"rank {rank} of 3 over (gloo|mpi): all well", outcome.text), outcome.text


def test_a_failure_before_the_channel_is_open_ends_the_job(launch):
    outcome = launch("early")
    assert outcome.code != 0
    assert "hvdtrain: error: too early [rank 1" in outcome.text
    assert "No message from" not in outcome.text, outcome.text


def test_the_watchdog_ends_ranks_that_hang_after_a_failure(launch):
    outcome = launch("stuck")
    assert outcome.code != 0
    assert "after rank 1 failed, and is ended" in outcome.text, outcome.text
