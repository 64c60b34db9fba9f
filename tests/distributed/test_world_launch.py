"""Worlds of several axes, and the one after another, between real processes over both controllers."""

import sys
from pathlib import Path

import pytest

from tests.launching import launcher, run

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).with_name("world_script.py")
RANKS = 4


@pytest.mark.parametrize("controller", ["gloo", "mpirun"])
def test_each_world_exchanges_along_its_axes(controller, tmp_path):
    pytest.importorskip("horovod", reason="horovod is not installed")
    outcome = run([*launcher(controller, RANKS), sys.executable, str(SCRIPT)], cwd=tmp_path, timeout=150)
    for rank in range(RANKS):
        assert f"rank {rank}: 3 worlds" in outcome.text, outcome.text[-6000:]
