"""What setup lacks is said before anything is installed."""

import shutil
from dataclasses import replace

import pytest

from hvdtrain.config.errors import SetupError
from hvdtrain.installation import install


@pytest.mark.parametrize(("version", "received"), [(None, "none"), ("2.20.0", "2.20.0"), ("2.2.1", "2.2.1")])
def test_another_tensorflow(machine, version, received):
    shutil.rmtree(machine.packages / "tensorflow-2.21.0.dist-info")
    if version:
        machine.installs("tensorflow", version)
    with pytest.raises(SetupError, match=rf"Received: {received} in .*pip install 'tensorflow~=2\.21\.0'"):
        machine.setup()


def test_a_python_of_the_operating_system(machine):
    machine.environment = replace(machine.environment, managed=True)
    with pytest.raises(SetupError, match=r"PEP 668.*python3 -m venv"):
        machine.setup()


def test_an_environment_that_may_not_be_written(machine, monkeypatch):
    monkeypatch.setattr(install.os, "access", lambda path, mode: path != machine.packages)
    with pytest.raises(SetupError, match=r"read-only\. Received: .*python3 -m venv --system-site-packages"):
        machine.setup()


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_path_that_the_build_can_not_take(machine, name):
    machine.environment = replace(machine.environment, prefix=machine.prefix.rename(machine.folder / name))
    machine.environment = replace(machine.environment, packages=machine.environment.prefix / "lib")
    machine.environment = replace(machine.environment, search=[str(machine.environment.packages)])
    with pytest.raises(SetupError, match=r"space or a colon in its path\. Received: .*/with.*elsewhere"):
        machine.setup()


def test_no_pip(machine):
    shutil.rmtree(machine.packages / "pip-26.0.dist-info")
    with pytest.raises(SetupError, match=r"pip must be installed\. .*python -m ensurepip"):
        machine.setup()


@pytest.mark.parametrize("tool", ["g++", "make", "patch"])
def test_no_compiler(machine, tool):
    (machine.bin / tool).unlink()
    with pytest.raises(SetupError, match=rf"{tool.replace('+', '.')} is missing.*sudo apt-get install g\+\+ make"):
        machine.setup()
    assert machine.calls() == [], "nothing was installed yet"


def test_no_disk_space(machine, monkeypatch):
    monkeypatch.setattr(install.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 499 << 20))
    with pytest.raises(SetupError, match=r"needs 500 MB .*Received: 499 MB"):
        machine.setup()
