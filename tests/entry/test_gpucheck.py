"""What doctor runs on GPUs, run on CPUs: the same sums and steps over two ranks."""

import json
import sys

import pytest

from tests.launching import launcher, run

pytestmark = pytest.mark.extended


def test_two_ranks_sum_and_learn_alike_in_both_dtypes(tmp_path):
    pytest.importorskip("horovod", reason="horovod is not installed")
    job = run([*launcher("mpirun", 2), sys.executable, "-m", "hvdtrain.runtime.gpucheck"], cwd=tmp_path, timeout=120)
    assert job.code == 0, job.text[-3000:]
    report = json.loads(next(line for line in job.out.splitlines() if line.startswith('{"ok"')))
    assert (report["ok"], report["size"], report["device"], report["wrong_elements"]) == (True, 2, "CPU", 0)
    (first, last), (_, half) = report["losses"]["float32"], report["losses"]["float16"]
    assert last < first / 5
    assert half != last, "float16 was not used"
    assert report["gigabytes_per_second"] > 0
