"""Processes that a launcher started and that cannot find one another end with one error, before any of them trains."""

import subprocess
import sys
from contextlib import ExitStack

import pytest

from tests.launching import Job
from tests.unit import launcher_environments as started_by

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("lone_ranks")]

INIT = "import hvdtrain; hvdtrain.init(); print('went on')"
FACE = "import hvdtrain.horovod as hvd; hvd.init(); print('went on')"
COMMAND = ["-m", "hvdtrain", "digits", "--max-steps", "1", "--run-dir", "run"]


def ranks_of(launcher: str) -> list[dict[str, str]]:
    """The environments of ranks 0 and 1 of 2."""
    if launcher == "torchrun":
        here = started_by.TORCHRUN | {"WORLD_SIZE": "2"}
        return [here | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    return [started_by.MPICH_5 | {"PMI_RANK": str(rank), "MPI_LOCALRANKID": str(rank)} for rank in range(2)]


CAUSES = {
    "torchrun": "does not read the place of a rank from torchrun or the like",
    "mpich": "mpiexec belongs to MPICH",
}


@pytest.mark.parametrize("launcher", CAUSES)
def test_they_are_refused_with_one_error(launcher, tmp_path):
    if launcher == "mpich" and "Open MPI" not in library():
        pytest.skip("this environment's MPI is not Open MPI")
    commands = [[sys.executable, *words] for words in (COMMAND, ["-c", INIT])]
    for command in commands:
        with ExitStack() as both:
            jobs = [both.enter_context(Job(command, cwd=tmp_path, **environ)) for environ in ranks_of(launcher)]
            texts = [job.expect(code=2).err for job in jobs]
        assert texts[0].startswith("hvdtrain: error: "), texts
        assert texts[0].count(CAUSES[launcher]) == 1
        assert len(texts[0].splitlines()) == 1
        assert texts[1] == ""
    assert list(tmp_path.iterdir()) == []


def test_horovods_own_init_is_refused_as_well(tmp_path):
    pytest.importorskip("horovod", reason="horovod is not installed")
    job = Job([sys.executable, "-c", FACE], cwd=tmp_path, **ranks_of("torchrun")[0]).expect(code=2)
    assert job.err.count(CAUSES["torchrun"]) == 1
    assert "Traceback" not in job.err


def library() -> str:
    pytest.importorskip("mpi4py", reason="mpi4py is not installed")
    version = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; print(MPI.Get_library_version())"
    done = subprocess.run([sys.executable, "-c", version], capture_output=True, text=True, check=False)
    return done.stdout
