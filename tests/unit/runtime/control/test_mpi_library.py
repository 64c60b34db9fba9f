"""What is refused before MPI_Init: launchers, libraries and processes that do not belong together."""

import os

import pytest

from hvdtrain.config.errors import LoneRanksError
from hvdtrain.runtime.control import mpi
from hvdtrain.runtime.control.mpi import prepare_mpi
from hvdtrain.runtime.launchers import detect_environment
from tests.unit import launcher_environments as started_by

OPEN_MPI, MPICH = ("Open MPI", "Open MPI v4.1.8"), ("MPICH", "MPICH 5.0.2")
PMI2 = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
}


@pytest.fixture
def prepare(monkeypatch):
    def call(environ, library):
        monkeypatch.setattr(mpi, "_library", lambda: library)
        prepare_mpi(detect_environment(environ), environ)

    return call


@pytest.fixture
def ompi_info(tmp_path, monkeypatch):
    """Put an `ompi_info` first that lists components."""
    monkeypatch.setattr(mpi.sys, "executable", str(tmp_path / "python"))

    def lists(*components):
        lines = "".join(f"echo 'mca:{component}:version:\"component:4.1.8\"'\n" for component in components)
        (tmp_path / "ompi_info").write_text(f"#!/bin/sh\n{lines}")
        (tmp_path / "ompi_info").chmod(0o755)

    return lists


@pytest.mark.parametrize(
    ("environ", "library", "message"),
    [
        (started_by.OPEN_MPI_4, MPICH, r"^mpirun belongs to Open MPI \(.*Python loads MPICH 5.0.2"),
        (started_by.MPICH_5, OPEN_MPI, r"^mpiexec belongs to MPICH \(.*Python loads Open MPI v4.1.8"),
    ],
)
def test_a_launcher_of_another_mpi(prepare, environ, library, message):
    with pytest.raises(LoneRanksError, match=message):
        prepare(environ, library)


@pytest.mark.parametrize("environ", [{}, started_by.OPEN_MPI_4])
@pytest.mark.parametrize("library", [OPEN_MPI, None])
def test_what_fits_or_cannot_be_told(prepare, environ, library):
    prepare(environ, library)


def test_pmi2_is_refused_where_open_mpi_was_built_without_it(prepare, ompi_info):
    ompi_info("pmix:isolated", "pmix:pmix3x", "btl:tcp")
    with pytest.raises(
        LoneRanksError, match=r"^srun .* --mpi=pmi2 does, and Open MPI v4.1.8 was built without.*--mpi=pmix"
    ) as no:
        prepare(PMI2, OPEN_MPI)
    assert no.value.rank == 1  # all ranks meet it, the first of them says so
    assert "\n" not in no.value.message


@pytest.mark.parametrize(
    ("environ", "components", "library"),
    [
        (PMI2, ["pmix:s2", "pmix:pmix3x"], OPEN_MPI),
        (PMI2, [], OPEN_MPI),  # an ompi_info that does not start
        (PMI2, ["pmix:pmix3x"], MPICH),
        (PMI2 | {"PMIX_RANK": "1"}, ["pmix:pmix3x"], OPEN_MPI),
    ],
)
def test_slurms_plugins_that_the_library_has(prepare, ompi_info, environ, components, library):
    ompi_info(*components)
    prepare(environ, library)


def test_a_child_without_the_ranks_connection_to_mpich(prepare):
    reading, writing = os.pipe()
    os.close(writing)
    rank = started_by.MPICH_5 | {"PMI_FD": str(reading)}
    prepare(rank, MPICH)
    os.close(reading)
    with pytest.raises(LoneRanksError, match=rf"PMI_RANK=1, PMI_FD={reading}, which is closed") as refused:
        prepare(rank, MPICH)
    assert "\n" not in refused.value.message
