"""Jobs that lack something: readers of their output, files that they may open, a folder of their own."""

import shlex
import subprocess
import sys
import textwrap

import pytest

from tests.launching import Job, hvdtrain, launched
from tests.unit.checkpoint.test_lock import HOLDER

pytestmark = pytest.mark.extended

SCRIPT = """\
    import keras
    import numpy as np
    import hvdtrain

    hvdtrain.init()
    for line in range(2000):  # more than a pipe holds
        print(line, "x" * 100, flush=True)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    trainer = hvdtrain.Trainer(model, "sgd", "mse")
    trainer.fit(np.ones((64, 5), "float32"), np.ones((64, 3), "float32"), batch=16, epochs=2)
    open(f"trained-{hvdtrain.rank()}", "w").close()
"""


def test_a_job_under_horovodrun_trains_on_when_nobody_reads_its_output(tmp_path):
    (tmp_path / "script.py").write_text(textwrap.dedent(SCRIPT))
    command = shlex.join(launched("gloo", 2, "script.py"))
    job = Job(["bash", "-c", f"{command} | head -1; exit ${{PIPESTATUS[0]}}"], cwd=tmp_path).expect()
    assert [(tmp_path / f"trained-{rank}").exists() for rank in (0, 1)] == [True, True]
    assert "Traceback" not in job.err, job.err[-3000:]


def test_too_few_files_are_an_error_of_one_line_that_names_the_limit(tmp_path):
    shell = f"ulimit -n 7; exec {sys.executable} -m hvdtrain digits"
    job = Job(["bash", "-c", shell], cwd=tmp_path).expect(code=1)
    (line,) = job.err.splitlines()
    assert line.startswith("hvdtrain: error: [Errno 24] Too many open files: "), line
    assert "A process of this job may open 7 files at a time, which are too few: start it with `ulimit -n 4096`" in line


def test_a_second_job_in_a_run_folder_is_refused_on_all_ranks(tmp_path):
    holder = [sys.executable, "-c", HOLDER, str(tmp_path / "run")]
    with subprocess.Popen(holder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout.readline() == "holds\n"
        job = hvdtrain("gloo", 2, "digits", "--run-dir", "run", cwd=tmp_path, code=None)
        first.kill()
    assert job.code == 2, job.text[-3000:]
    assert job.err.count("One job at a time writes to a folder. Received: run, to which process ") == 1, job.err
    assert f"process {first.pid} on " in job.err
