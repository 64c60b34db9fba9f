"""The command `setup`, and what activating the environment sets afterwards."""

import configparser
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.cli import setup as verb
from hvdtrain.installation import activation, install
from hvdtrain.runtime.python_environment import PythonEnvironment


def test_activation_allows_root_and_more_ranks_than_cores_once(machine):
    for name in ("activate", "activate.fish", "activate.csh"):
        (machine.prefix / "bin" / name).write_text("# its own\n")
    (machine.prefix / "conda-meta").mkdir()
    machine.setup()
    machine.setup("none")
    machine.setup()
    hook = machine.prefix / "etc/conda/activate.d/hvdtrain.sh"
    for script in [*(machine.prefix / "bin").glob("activate*"), hook]:
        assert script.read_text().count("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == 1, script
        assert script.read_text().count("OMPI_MCA_oob_tcp_keepalive_time") == 1, script
    assert (machine.prefix / "bin/activate").read_text().startswith("# its own\n")
    parameters = (machine.prefix / "etc/openmpi-mca-params.conf").read_text()
    assert parameters.count("rmaps_base_oversubscribe = 1") == 1


def test_activation_of_an_earlier_setup_gets_what_is_new(machine):
    script = machine.prefix / "bin/activate"
    script.write_text(f"{activation._WHY}\n{activation._SCRIPTS['activate']}")
    machine.setup()
    out = subprocess.run(
        ["sh", "-c", f". {script}; env"], env={"PATH": "/usr/bin:/bin"}, check=True, capture_output=True, text=True
    ).stdout
    set_by_it = {line for line in out.splitlines() if line.startswith("OMPI_MCA")}
    assert set_by_it == {f"OMPI_MCA_oob_tcp_keepalive_{each}" for each in ("time=5", "intvl=2", "probes=3")}
    assert script.read_text().count("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM") == 1


def test_activation_sets_the_variables_for_root_only(tmp_path):
    (tmp_path / "id").write_text("#!/bin/sh\necho $UID_OF_TEST\n")
    (tmp_path / "id").chmod(0o755)
    for uid, expected in (("0", "1 1"), ("1000", "")):
        script = f"set -eu; {activation._SCRIPTS['activate']}"
        script += "echo ${OMPI_ALLOW_RUN_AS_ROOT:-} ${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM:-}"
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "UID_OF_TEST": uid}
        out = subprocess.run(["sh", "-c", script], env=environ, check=True, capture_output=True, text=True).stdout
        assert out.strip() == expected


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


def test_conda_environments_are_activated_by_conda(machine):
    (machine.prefix / "conda-meta").mkdir()
    assert machine.environment.activation() == f"conda activate {machine.prefix}"


# --- the command ---


@pytest.fixture
def command(machine, monkeypatch):
    """Run the verb on the stub environment, and return its exit code."""
    monkeypatch.setattr(PythonEnvironment, "active", classmethod(lambda cls: machine.environment))
    return lambda *words: verb.main(list(words))


def test_the_command_says_what_to_do_next(command, capsys):
    assert command() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("setup: ready: ")
    assert command() == 0
    assert capsys.readouterr().out.startswith("setup: Horovod 0.28.1 is in place: ")
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
    with pytest.raises(SystemExit) as stopped:
        command("--mpi", "openmpi")
    assert stopped.value.code == 2
    assert "choose from" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(command, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(verb, "install", interrupted)
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
    (setuptools,) = (need for need in extra if need.name == "setuptools")
    assert [setuptools.marker.evaluate({"python_version": python}) for python in ("3.11", "3.12")] == [False, True]
