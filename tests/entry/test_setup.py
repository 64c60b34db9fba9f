"""launch/setup.sh on machines made of stubs: what is missing, what fails, when it works and when it rests.

What it leaves to `python -m hvdtrain setup` is tested in tests/unit/installation/. No network, no compiler, the
real .venv untouched.
"""

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.entry.stub_machine import PYTHON, Machine
from tests.waiting import wait_until


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# --- what is missing is said in one line, with the command that mends it ---


def test_no_python(machine):
    machine.lacks("python3.11")
    line = machine.refusal()
    assert line.startswith("setup: Python 3.11, 3.12 or 3.13 is missing: sudo apt-get install python3.11")


@pytest.mark.parametrize("chosen", ["python3.10", "no-such-python"])
def test_the_python_that_was_asked_for_is_the_only_one_tried(machine, chosen):
    machine.has("python3.10", PYTHON.replace(":-3.11}", ":-3.10}"))
    line = machine.refusal(PYTHON=chosen)
    assert f"PYTHON={chosen} is not a Python 3.11, 3.12 or 3.13" in line
    assert "unset it" in line


def test_no_venv_module(machine):
    line = machine.refusal(PARTS="bare")
    assert line == "setup: Python 3.11 has no venv and ensurepip modules: sudo apt-get install python3.11-venv"


@pytest.mark.parametrize("tool", ["g++", "make", "patch"])
def test_no_compiler(machine, tool):
    machine.lacks(tool)
    assert machine.refusal() == f"setup: {tool} is missing: sudo apt-get install g++ make patch"


def test_no_disk(machine):
    line = machine.refusal(FREE_MB="3999")
    assert "3999 MB free and .venv needs 4000: free some" in line


def test_a_gpu_needs_more_disk_and_brings_cuda(machine):
    machine.has("nvidia-smi", "echo GPU 0: stub")
    assert ".venv needs 12000" in machine.refusal(FREE_MB="5000")
    machine.setup()
    assert any("requirements-cuda.txt" in call for call in machine.work())


def test_a_login_node_is_set_up_for_gpus_and_stays_so(machine):
    machine.setup("--gpu")
    assert any("requirements-cuda.txt" in call for call in machine.work())
    assert machine.setup() == ""
    assert machine.work() == []
    machine.setup("--no-gpu")
    assert not any("requirements-cuda.txt" in call for call in machine.work())


# --- what fails later shows the log and names it; the next call takes up from there ---


def test_a_failing_pip(machine):
    done = machine.run("setup.sh", FAIL="requirements.txt")
    assert done.returncode == 1
    assert "error: the stub was told to fail" in done.stderr
    assert "setup: a package can't be installed (the whole output: " in done.stderr.splitlines()[-1]
    assert "an installation in it was cut short" in machine.setup()


def test_a_failing_build(machine):
    done = machine.run("setup.sh", FAIL="hvdtrain setup")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (1, "error: the stub was told to fail")
    machine.work()
    machine.setup(HVDTRAIN_MPI="none")
    assert machine.work() == [], "the packages are whole: only Horovod's part is tried again"


def has_content(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def interrupt(machine: Machine, step: str) -> None:
    """Send SIGTERM to a setup that is in `step`, which must end with it."""
    hanging = machine.folder / "calls.hanging"
    with machine.start("setup.sh", HANG=step) as process:
        wait_until(lambda: has_content(hanging))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=200) == 143
    child = int(hanging.read_text())
    wait_until(lambda: not is_alive(child))


def test_an_interrupted_setup_ends_its_children_and_the_next_one_starts_clean(machine):
    interrupt(machine, "requirements.txt")
    assert "making .venv anew: an installation in it was cut short" in machine.setup()


@pytest.mark.skipif(shutil.which("flock") is None, reason="without flock calls are not kept apart")
def test_two_setups_at_once_do_the_work_once(machine):
    hanging = machine.folder / "calls.hanging"
    with machine.start("setup.sh", HANG="requirements.txt") as first:
        wait_until(lambda: has_content(hanging))
        with machine.start("setup.sh") as second:
            assert second.stdout is not None
            assert "another setup is at work here" in second.stdout.readline()
            hanging.unlink()
            assert (first.wait(timeout=200), second.wait(timeout=200)) == (0, 0)
    assert sum("requirements.txt" in call for call in machine.work()) == 1


# --- a second call does nothing, until something that matters has changed ---


def test_a_second_call_does_nothing_and_takes_little(machine):
    machine.setup()
    work = machine.work()
    assert [call.split()[-1] for call in work if "hvdtrain setup" in call] == ["setup"]
    assert len(work) == 4
    before = os.times()
    assert machine.setup() == ""
    after = os.times()
    assert after.children_user + after.children_system - before.children_user - before.children_system < 1.0
    assert machine.work() == []


def test_the_test_packages_are_added_to_what_is_there(machine):
    machine.setup()
    machine.work()
    machine.setup("--test")
    assert sum(" -m pip " in call for call in machine.work()) == 1
    assert machine.setup("--test") == ""
    assert machine.setup() == ""
    assert machine.work() == []


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("# changed\n")


def changed_file(name):
    return lambda machine: append(machine.root / name)


def another_package(name):
    return lambda machine: shutil.rmtree(next(machine.root.glob(f".venv/lib/*/site-packages/{name}-*")))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(changed_file("launch/requirements.txt"), id="requirements"),
        pytest.param(changed_file("launch/lib/python.sh"), id="setup itself"),
        pytest.param(changed_file("setup.cfg"), id="metadata"),
        pytest.param(another_package("tensorflow"), id="other tensorflow"),
        pytest.param(lambda machine: (machine.root / ".venv/bin/python").unlink(), id="python gone"),
        pytest.param(lambda machine: machine.has("nvidia-smi", "echo GPU 0: stub"), id="driver installed"),
    ],
)
def test_a_change_that_matters_brings_the_work_back(machine, change):
    machine.setup()
    assert machine.setup() == ""
    change(machine)
    assert "ready" in machine.setup()
    assert machine.setup() == ""


def test_a_moved_repository_gets_a_new_venv(machine):
    machine.setup()
    machine.root = machine.root.rename(machine.folder / "elsewhere")
    assert "making .venv anew: it was moved here from" in machine.setup()


def test_a_venv_whose_python_vanished_is_made_anew(machine):
    machine.setup()
    (machine.root / ".venv/bin/python").unlink()
    stray = machine.root / ".venv/lib/stray"
    stray.touch()
    assert "making .venv anew: its Python is gone" in machine.setup()
    assert not stray.exists()
