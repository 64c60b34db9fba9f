"""The command `setup`, and the command that it names at its end."""

import configparser
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.cli.doctor import setup
from hvdtrain.config.errors import UserError
from hvdtrain.installation import install
from hvdtrain.runtime.horovod_patches import patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment


@pytest.mark.parametrize(
    ("path", "root", "script", "expected"),
    [
        ("{own}", False, True, "horovodrun -np 2 python -m hvdtrain"),
        ("/usr/bin", False, True, "source {own}/activate && horovodrun -np 2 python -m hvdtrain"),
        ("{own}", True, True, "source {own}/activate && horovodrun -np 2 python -m hvdtrain"),
        ("{own}", True, False, "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 && horovodrun"),
    ],
)
def test_what_to_do_next(machine, monkeypatch, path, root, script, expected):
    own = machine.prefix / "bin"
    machine.has("horovodrun", folder=own)
    if script:
        (own / "activate").touch()
    monkeypatch.setattr(install.os, "geteuid", lambda: 0 if root else 1000)
    command = install.next_command(machine.environment, {"PATH": path.format(own=own)})
    assert command.startswith(expected.format(own=own))


# --- the command ---


@pytest.fixture
def command(machine, monkeypatch):
    """Run the verb on the stub environment, and return its exit code."""
    monkeypatch.setattr(PythonEnvironment, "active", classmethod(lambda cls: machine.environment))
    return lambda *words: setup(list(words))


def test_the_command_says_what_to_do_next(command, capsys):
    assert command() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("setup: ready: ")
    assert command() == 0
    assert capsys.readouterr().out.startswith(f"setup: Horovod {patched_version()} is in place: ")
    assert command("--quiet") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("words", [["--mpi", "none"], []])
def test_mpi_is_chosen_by_flag_or_variable(command, machine, words):
    machine.set(HVDTRAIN_MPI="pypi" if words else "none")
    assert command(*words) == 0
    assert machine.launched == ["gloo"]


def test_errors_are_one_message(command, machine, capsys):
    machine.set(HVDTRAIN_MPI="system")
    assert command() == 1
    assert capsys.readouterr().err.startswith("hvdtrain: error: --mpi system (HVDTRAIN_MPI=system) needs mpicxx")
    with pytest.raises(UserError, match="choose from"):
        command("--mpi", "openmpi")


def test_ctrl_c_is_no_traceback(command, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hvdtrain.cli.doctor.install", interrupted)
    assert command() == 130
    assert capsys.readouterr().err == "setup: interrupted; the next call goes on from here\n"


def test_the_extra_holds_what_horovod_needs():
    metadata = configparser.ConfigParser()
    metadata.read(Path(__file__).parents[3] / "setup.cfg")
    extra = [Requirement(line) for line in metadata["options.extras_require"]["horovod"].split("\n") if line]
    names = {need.name.lower() for need in extra}
    needs = map(Requirement, distribution("horovod").requires or [])
    assert {need.name.lower() for need in needs if need.marker is None} <= names
    assert "horovod" not in names, "pip can't build it for this TensorFlow"
