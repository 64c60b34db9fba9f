"""What goes wrong, goes wrong once, clearly, soon, and overwrites nothing."""

import re
import sys

import pytest

from tests.launching import Job, hvdtrain, launched


def refused(job, *words):
    """The job ended with an error that holds `words`, said once and without a traceback of ours."""
    assert job.code != 0, job.text
    assert job.err.count("hvdtrain: error:") == 1, job.text[-4000:]
    message = job.err[job.err.index("hvdtrain: error:") :]
    for word in words:
        assert word in message, job.text[-4000:]
    # horovodrun adds a traceback of its own; ours and that of TensorFlow must not be there.
    ours = r'File "[^"]*/(hvdtrain/(cli|config|data|runtime|training)|site-packages/(keras|tensorflow))/'
    assert not re.search(ours, job.err), job.text[-4000:]


@pytest.mark.parametrize("controller", [pytest.param("gloo", marks=pytest.mark.extended), "mpirun"])
def test_unknown_option(tmp_path, controller):
    job = hvdtrain(controller, 2, "digits", "--epoch", "3", cwd=tmp_path, code=None)
    refused(job, "--epoch", "--epochs")
    assert not list(tmp_path.iterdir())


@pytest.mark.extended
def test_a_batch_that_does_not_divide(tmp_path):
    """All ranks meet the mistake; Horovod's threads say nothing of the connections that the first closes."""
    job = hvdtrain("gloo", 3, "digits", cwd=tmp_path, code=None)
    refused(job, "64", "3")
    assert "background loop" not in job.text


@pytest.mark.extended
def test_ranks_with_different_configurations(tmp_path):
    words = ["-m", "hvdtrain", "--run-dir", "run", "--epochs"]
    command = launched("mpirun", 1, *words, "2", ":", "-np", "1", sys.executable, *words, "3")
    job = Job(command, cwd=tmp_path).expect(code=None)
    refused(job, "configuration", "rank 0", "rank 1")
    assert not (tmp_path / "run").exists()


@pytest.mark.extended
def test_a_mistake_on_one_rank_only(tmp_path):
    words = ["-m", "hvdtrain", "--run-dir", "run"]
    command = launched("mpirun", 1, *words, ":", "-np", "1", sys.executable, *words, "--epocs", "3")
    job = Job(command, cwd=tmp_path).expect(code=None)
    refused(job, "--epocs", "rank 1")


CRASH = """\
import hvdtrain, keras
keras.ops.zeros(1)
hvdtrain.init()
import numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)], name="alone")
model.compile("sgd", "mse")
model.fit(np.zeros((8, 2)), np.zeros((8, 1)), verbose=0)
trainer = hvdtrain.Trainer(model)
class Trap:
    def __array__(self, dtype=None, copy=None):
        raise ZeroDivisionError("the file is broken")
data = np.zeros((64, 2), "float32"), np.zeros((64, 1), "float32")
trainer.fit(data, batch=8, verbose=False)
if hvdtrain.rank() == 1:
    data = Trap(), data[1]
trainer.fit(data, batch=8, epochs=1000, verbose=False)
"""


@pytest.mark.parametrize("controller", [pytest.param("gloo", marks=pytest.mark.extended), "mpirun"])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(tmp_path, controller):
    (tmp_path / "crash.py").write_text(CRASH)
    job = Job(launched(controller, 2, "crash.py"), cwd=tmp_path).expect(code=None)
    assert job.code != 0
    assert job.text.count("ZeroDivisionError: the file is broken") == 1, job.text[-4000:]
    assert "rank 1" in job.text
    assert job.text.count("crash.py:3: UserWarning: TensorFlow was in use before hvdtrain.init()") == 1, job.text
    assert job.text.count("each of the 2 ranks has trained 'alone' by itself") == 1, job.text[-4000:]
    assert "HorovodInternalError" not in job.text, job.text[-4000:]
    assert "hangs" not in job.text, job.text[-4000:]
