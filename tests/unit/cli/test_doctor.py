"""`hvdtrain doctor`: what each check says of what it finds, with broken parts put before it."""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.cli import doctor
from hvdtrain.runtime.diagnosis import diagnose
from hvdtrain.runtime.diagnosis import diagnose as diagnosis
from hvdtrain.runtime.diagnosis.machine import Check, Outcome, failed, first_line, ok, run, warning
from hvdtrain.runtime.diagnosis.probe import find, probe
from hvdtrain.runtime.horovod_patches import patched_version, series_hashes

TENSORFLOW = {"version": "2.21.0", "gpus": 0}
HOROVOD = {"version": patched_version(), "patches": series_hashes(), "built_for": "2.21.0"}
HOROVOD |= {"gloo": True, "mpi": True, "nccl": 0, "cuda": False}
OPEN_MPI = "Open MPI v4.1.8, package: Open MPI user@localhost, ident: 4.1.8, repo rev: v4.1.8, Feb 04, 2025"

Script = Callable[[str, str], Path]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Make a shell script in a folder that comes first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, text: str) -> Path:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{textwrap.dedent(text)}")
        path.chmod(0o755)
        return path

    return make


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put modules of the given sources before the installed ones, for processes that are started."""

    def make(sources: dict[str, str]) -> None:
        for name, source in sources.items():
            path = tmp_path / "modules" / f"{name.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(source))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))

    make(
        {
            "mpi4py": """
            import types
            __version__, rc = '4.1.2', types.SimpleNamespace()
            MPI = types.SimpleNamespace(Get_library_version=lambda: 'MPICH Version: 4.3.0')
        """,
            "tensorflow": """
            import types
            __version__ = '2.21.0'
            config = types.SimpleNamespace(list_physical_devices=lambda kind: [kind])
        """,
            "keras": """
            import types
            __version__ = '3.12.0'
            backend = types.SimpleNamespace(backend=lambda: 'tensorflow')
        """,
            "horovod.__init__": "__version__ = '0.28.1'",
            "horovod.tensorflow": "gloo_built = mpi_built = cuda_built = lambda: True; nccl_built = lambda: 23203",
        }
    )
    return make


class TestProbe:
    def test_finds_what_each_library_says(self, modules: Callable[..., None]) -> None:
        assert probe(timeout=60) == {
            "mpi4py": {"version": "4.1.2", "library": "MPICH Version: 4.3.0"},
            "tensorflow": {"version": "2.21.0", "gpus": 1},
            "keras": {"version": "3.12.0", "backend": "tensorflow"},
            "horovod": {
                "version": "0.28.1",
                "patches": {},
                "built_for": None,
                "gloo": True,
                "mpi": True,
                "nccl": 23203,
                "cuda": True,
            },
        }

    def test_a_library_that_does_not_load_is_named_and_the_others_are_found(self, modules: Callable[..., None]) -> None:
        modules({"horovod.tensorflow": "raise ImportError('mpi_lib.so: undefined symbol: _ZN3tsl6StatusE')"})
        found = probe(timeout=60)
        assert found["horovod"] == {"error": "ImportError: mpi_lib.so: undefined symbol: _ZN3tsl6StatusE"}
        assert found["keras"]["version"] == "3.12.0"

    def test_a_library_that_ends_the_process_is_named(self, modules: Callable[..., None]) -> None:
        modules({"tensorflow": "import os; os.write(2, b'Illegal instruction'); os._exit(132)"})
        found = probe(timeout=60)
        assert found["mpi4py"]["version"] == "4.1.2"
        assert found["tensorflow"]["error"] == "its import ended the process with code 132\nIllegal instruction"
        assert found["horovod"]["error"] == "not reached, since tensorflow failed"

    def test_a_library_that_hangs_is_named(self, modules: Callable[..., None]) -> None:
        modules({"mpi4py": "import time; time.sleep(60)"})
        start = time.monotonic()
        assert probe(timeout=1.5)["mpi4py"]["error"] == "its import took more than 1.5 s"
        assert time.monotonic() - start < 30

    def test_a_library_that_is_not_there(self) -> None:
        assert find("no_such_library") == {"missing": True}


REPORT = '{"ok": true, "size": %d, "controller": "%s", "wrong_elements": 0}'


def _dies(pid: int, patience: float = 10.0) -> bool:
    """Return whether a process that was killed ends; its parent need not have noticed."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
            return True
        time.sleep(0.02)
    return False


class TestExchange:
    @pytest.mark.parametrize(
        ("text", "status", "detail"),
        [
            (f"echo '[1,0]<stdout>:{REPORT % (2, 'mpi')}'", "ok", "adds up"),
            (f"echo '{REPORT % (1, 'mpi')}'; echo '{REPORT % (1, 'mpi')}'", "failed", "1 rank instead of 2"),
            (f"echo '{REPORT % (2, 'gloo')}'", "failed", "spoke gloo"),
            (f"echo '{REPORT % (2, 'mpi')}'; exit 3", "failed", "exit code 3"),
            ("""echo '{"ok": false, "wrong_elements": 7}'; exit 1""", "failed", "wrong in 7 elements"),
            ("""echo '{"ok": false, "error": "ImportError: x"}'; exit 1""", "failed", "ImportError: x"),
            (
                "echo 'I0000 00 chatter' >&2; echo no route to host >&2; exit 5",
                "failed",
                "exit code 5\nno route to host",
            ),
            ("exit 0", "failed", "exit code 0"),
            ("echo '{\"ok\": tr}'", "failed", '{"ok": tr}'),
        ],
    )
    def test_what_a_launch_says(self, script: Script, text: str, status: str, detail: str) -> None:
        check = diagnose.check_ranks("mpi", [str(script("launcher", text))], timeout=30)
        assert check.name == "2 ranks, MPI"
        assert (check.status, bool(check.fix)) == (status, status != "ok")
        assert detail in check.detail
        assert "chatter" not in check.detail

    def test_a_launcher_that_is_not_there(self) -> None:
        check = diagnose.check_ranks("mpi", ["/nowhere/mpirun"])
        assert (check.status, check.detail) == ("failed", "/nowhere/mpirun: No such file or directory")

    def test_a_launch_that_hangs_is_killed_with_all_it_started(self, script: Script, tmp_path: Path) -> None:
        """The rank is in a session of its own, as launchers make them."""
        hang = script("hang", f"setsid sleep 321 & echo $! > {tmp_path}/pid; echo 'stuck in a barrier'; wait")
        start = time.monotonic()
        check = diagnose.check_ranks("gloo", [str(hang)], timeout=1.0)
        assert time.monotonic() - start < 20
        assert (check.status, check.detail) == ("failed", "no answer after 1 s\nstuck in a barrier")
        assert _dies(int((tmp_path / "pid").read_text()))

    def test_variables_of_another_job_do_not_reach_the_ranks(self) -> None:
        stale = {"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_ess": "^singleton", "HOME": "/root"}
        environ = diagnose.launch_environment(stale)
        assert stale.keys() & environ.keys() == {"HOME"}


@pytest.fixture
def python(script: Script, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have a shell script play this process's Python."""
    return lambda text: monkeypatch.setattr(sys, "executable", str(script("python", text)))


class TestAlone:
    @pytest.fixture(autouse=True)
    def own_mpi(self, monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
        version: list[str | None] = ["4.1.8"]
        monkeypatch.setattr(diagnose.PythonEnvironment, "version", lambda self, *names: version[0])
        return version

    def test_one_process_starts(self, python: Callable[[str], None]) -> None:
        python(f"echo '{REPORT % (1, 'mpi')}'")
        for check in (diagnose.check_horovod_alone(), diagnose.check_mpi_alone()):
            assert (check.status, check.fix) == ("ok", "")

    @pytest.mark.parametrize("check", [diagnose.check_horovod_alone, diagnose.check_mpi_alone])
    def test_one_that_aborts_is_named_with_the_fix(
        self, python: Callable[[str], None], own_mpi: list[str | None], check: Callable[[], Check]
    ) -> None:
        python("echo 'An error occurred in MPI_Init_thread' >&2; exit 1")
        found = check()
        assert found.detail == "exit code 1\nAn error occurred in MPI_Init_thread"
        assert (found.status, found.fix[:40]) == ("failed", "python -m hvdtrain setup; see all of it:")
        own_mpi[0] = None  # MPI is the system's, which may need its launcher
        assert (check().status, check().fix[:39]) == ("warning", "start such programs with mpirun -np 1; ")


class TestProcess:
    def test_output_and_exit_code(self) -> None:
        outcome = run(["sh", "-c", "echo one; echo two >&2; echo; exit 3"], timeout=20)
        assert (outcome.returncode, outcome.tail(1)) == (3, "two")

    @pytest.mark.extended
    def test_one_that_escaped_is_not_waited_for(self, tmp_path: Path) -> None:
        """It is no descendant any more by the time the command is killed."""
        escape = f"(setsid sleep 20 & echo $! > {tmp_path}/pid) & echo gone; exec sleep 20"
        start = time.monotonic()
        outcome = run(["sh", "-c", escape], timeout=1)
        assert time.monotonic() - start < 15
        assert outcome == Outcome(None, "gone\n")
        psutil.Process(int((tmp_path / "pid").read_text())).kill()

    def test_first_line_of_what_fails_is_none(self) -> None:
        assert first_line(["sh", "-c", "echo; echo second"]) == "second"
        assert first_line(["sh", "-c", "echo second; exit 1"]) is None
        assert first_line(["/nowhere"]) is None


LONG = failed(
    "2 ranks, Gloo",
    "exit code 1\n" + "a library could not be loaded " * 6 + "\n/a/very/long/path" + "/folder" * 20,
    "source .venv/bin/activate, or load the MPI module that Horovod was built with; or: horovodrun --gloo",
)


class TestCommand:
    @pytest.fixture
    def found(self, monkeypatch: pytest.MonkeyPatch) -> list[Check]:
        checks = [ok("Python", "3.11.9")]
        monkeypatch.setattr(doctor, "diagnose", lambda announce=None: iter(checks))
        return checks

    def test_exit_code_and_verdict(self, found: list[Check], capsys: pytest.CaptureFixture[str]) -> None:
        assert doctor.main([]) == 0
        found.append(warning("Horovod", "not installed", "python -m hvdtrain setup"))
        assert doctor.main([]) == 0
        assert capsys.readouterr().out.endswith(
            "                        fix: python -m hvdtrain setup\n1 to look at, 1 ok\n"
        )
        found.append(failed("Keras", "2.15", "pip install keras"))
        assert doctor.main([]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "ok       Python         3.11.9",
            "warning  Horovod        not installed",
            "                        fix: python -m hvdtrain setup",
            "failed   Keras          2.15",
            "                        fix: pip install keras",
            "1 failed, 1 to look at, 1 ok",
        ]

    def test_plain_text_fits_80_columns_and_loses_nothing(self) -> None:
        lines = doctor.plain_lines(LONG)
        assert all(len(line) <= 80 for line in lines if "/a/very/long" not in line)
        said = " ".join(" ".join(lines).split())
        assert " ".join(LONG.detail.split()) in said
        assert f"fix: {LONG.fix}" in said


class TestWhole:
    @pytest.fixture
    def stubs(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = {
            "tensorflow": TENSORFLOW,
            "keras": {"version": "3.12.0", "backend": "tensorflow"},
            "horovod": HOROVOD,
            "mpi4py": {"library": OPEN_MPI},
        }
        monkeypatch.setattr(diagnosis, "probe", lambda: found)
        monkeypatch.setattr(diagnose, "check_horovod_alone", lambda: ok("1 process", ""))
        monkeypatch.setattr(diagnose, "check_mpi_alone", lambda: ok("1 process, MPI", ""))
        monkeypatch.setattr(diagnose, "check_gloo", lambda: ok("2 ranks, Gloo", ""))
        monkeypatch.setattr(diagnose, "check_mpi", lambda: ok("2 ranks, MPI", ""))
        return found

    def names(self) -> Iterator[str]:
        return (check.name for check in diagnosis.diagnose())

    def test_all_parts_are_looked_at(self, stubs: dict[str, dict[str, Any]], script: Script) -> None:
        script("mpirun", "echo 'mpirun (Open MPI) 4.1.8'")
        assert list(self.names()) == [
            "Python",
            "TensorFlow",
            "Keras",
            "Horovod",
            "Controllers",
            "MPI",
            "1 process",
            "1 process, MPI",
            "2 ranks, Gloo",
            "2 ranks, MPI",
            "Cores",
            "Memory",
            "Allocator",
            "/dev/shm",
            "GPUs",
            "Job key",
        ]

    def test_what_needs_horovod_is_left_out_without_it(self, stubs: dict[str, dict[str, Any]]) -> None:
        stubs["horovod"] = {"missing": True}
        assert set(self.names()).isdisjoint({"Controllers", "MPI", "1 process", "2 ranks, Gloo", "2 ranks, MPI"})

    def test_mpi_is_not_launched_where_it_does_not_fit(self, stubs: dict[str, dict[str, Any]], script: Script) -> None:
        script("mpirun", "echo 'mpirun (Open MPI) 5.0.1'")
        names = list(self.names())
        assert {"1 process", "2 ranks, Gloo"} <= set(names)
        assert {"1 process, MPI", "2 ranks, MPI"}.isdisjoint(names)
