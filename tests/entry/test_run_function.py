"""`hvdtrain.run` with a real job: what the ranks print, how they fail, and an interrupt."""

import re
import signal
import sys

import pytest

from tests.launching import Job

pytestmark = pytest.mark.extended

SCRIPT = """
import time
import hvdtrain

def sum_of_ranks(number):
    import hvdtrain
    hvdtrain.init()
    import tensorflow as tf
    total = float(hvdtrain.allreduce(tf.constant(float(hvdtrain.rank())), "sum"))
    print("rank", hvdtrain.rank(), "is there")
    return hvdtrain.rank(), total + number

def fail():
    import hvdtrain
    hvdtrain.init()
    if hvdtrain.rank() == 1:
        raise ValueError("no such word")
    hvdtrain.barrier()

def wait():
    import hvdtrain
    hvdtrain.init()
    print("waiting", flush=True)
    time.sleep(600)
"""


def test_a_job_returns_its_results_by_rank_over_mpi_and_gloo(tmp_path):
    (tmp_path / "script.py").write_text(
        f"{SCRIPT}\nprint(hvdtrain.run(sum_of_ranks, [10], np=2))\n"
        "print(hvdtrain.run(sum_of_ranks, [20], options=['--gloo']))\n"
    )
    answers = ["[(0, 11.0), (1, 11.0)]", "[(0, 21.0), (1, 21.0)]"]
    done = Job([sys.executable, "script.py"], cwd=tmp_path).expect(*answers)
    assert len(re.findall(r"rank .*is there", done.out)) == 4, done.out
    assert not list(tmp_path.glob("hvdtrain-run-*"))


def test_an_exception_of_a_rank_is_that_of_the_call(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nhvdtrain.run(fail)\n")
    done = Job([sys.executable, "script.py"], cwd=tmp_path).expect(code=1)
    assert "LaunchError: The function failed on rank 1: ValueError: no such word" in done.err
    assert "in fail" in done.out, "the traceback of the rank is printed"


def test_an_interrupt_ends_the_ranks_and_is_that_of_the_caller(tmp_path):
    (tmp_path / "script.py").write_text(f"{SCRIPT}\nhvdtrain.run(wait)\n")
    with Job([sys.executable, "-u", "script.py"], cwd=tmp_path) as job:
        job.wait_for("waiting")
        job.process.send_signal(signal.SIGINT)
        assert job.wait(seconds=90) is not None, "the ranks go on"
        assert "KeyboardInterrupt" in job.text
