"""A user's script that is killed and just run again."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from hvdtrain.checkpoint.naming import complete
from tests.launching import launcher, run

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).with_name("interrupted_script.py")


def script(controller, size, folder, *kill):
    pytest.importorskip("horovod", reason="horovod is not installed")
    return run(
        [*launcher(controller, size), sys.executable, str(SCRIPT), str(folder), *kill],
        cwd=folder,
        timeout=90,
        code=None,
    )


def test_a_script_that_is_killed_goes_on_when_it_is_run_again(tmp_path):
    killed = script("mpirun", 2, tmp_path, "1", "8")
    assert killed.code != 0, killed.text[-3000:]
    assert "resumed from" not in killed.out
    names = [path.name for path in complete(tmp_path)]
    assert names[-1] == "step-00000006"
    assert "step-00000004" in names, "the best epoch by then"
    alone = tmp_path / "alone"
    shutil.copytree(tmp_path, alone)

    again = script("gloo", 2, tmp_path)
    assert again.code == 0, again.text[-3000:]
    assert "resumed from step-00000006" in again.out
    assert re.search(r"error 0\.0$", again.out, re.MULTILINE), "the same to the last bit on as many ranks"
    assert "losses True" in again.out
    assert "best True" in again.out

    fewer = script("none", 1, alone)
    assert fewer.code == 0, fewer.text[-3000:]
    assert "resumed from step-00000006" in fewer.out
    assert float(re.search(r"error (\S+)", fewer.out)[1]) < 1e-9
