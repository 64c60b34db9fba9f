"""A Python environment made of stubs, for the tests of `python -m hvdtrain setup`: no network, no compiler."""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest

from hvdtrain.installation import install
from hvdtrain.runtime.diagnosis.machine import Check, ok
from hvdtrain.runtime.horovod_patches import patched_version
from hvdtrain.runtime.python_environment import PythonEnvironment

# Plays the environment's Python with pip. It notes each call, and fails where its arguments hold $FAIL.
PYTHON = f"""#!{sys.executable} -IS
import os, pathlib, re, shutil, sys, tarfile

words, packages = " ".join(sys.argv[1:]), pathlib.Path(os.environ["SITE"])
with open(os.environ["CALLS"], "a") as calls:
    print(words, file=calls)
if os.environ.get("FAIL", "never") in words:
    sys.exit("ERROR: the stub was told to fail")
if " download " in words:
    folder = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
    (folder / "horovod-0.28.1" / "horovod").mkdir(parents=True)
    with tarfile.open(folder / "horovod-0.28.1.tar.gz", "w:gz") as archive:
        archive.add(folder / "horovod-0.28.1", "horovod-0.28.1")
    shutil.rmtree(folder / "horovod-0.28.1")
elif " wheel " in words:
    folder = pathlib.Path(sys.argv[sys.argv.index("--wheel-dir") + 1])
    folder.mkdir()
    (folder / "horovod-{patched_version()}-stub.whl").write_text("built")
    (packages / "build-environment").write_text(repr(dict(os.environ)))
elif " uninstall " in words:
    shutil.rmtree(next(packages.glob(f"{{sys.argv[-1]}}-*")))
elif "--target" not in words:
    for name, version in re.findall(r"([a-z0-9]+)(?:==|>=|-)([0-9.]+[0-9](?:\\+hvdtrain\\.[0-9]+)?)", words):
        for old in packages.glob(f"{{name}}-*.dist-info"):
            shutil.rmtree(old)
        (packages / f"{{name}}-{{version}}.dist-info").mkdir()
        (packages / f"{{name}}-{{version}}.dist-info/METADATA").write_text(f"Name: {{name}}\\nVersion: {{version}}\\n")
"""

CHECKS = ("mpi_alone", "horovod_alone", "gloo", "mpi")
"""Those that setup makes at its end, in their order."""


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
        self.checks = {name: ok(name, "an all-reduce adds up") for name in CHECKS}
        self.launched: list[str] = []
        self.has("python", "", self.prefix / "bin")
        (self.prefix / "bin/python").write_text(PYTHON)
        for name, version in {"tensorflow": "2.21.0", "pip": "26.0", "packaging": "26.3", "psutil": "7"}.items():
            self.installs(name, version)
        self.installs("hvdtrain", "0.1.0", "".join(f"Requires-Dist: {need}\n" for need in REQUIRES))
        for tool in ("sh", "getconf"):
            (self.bin / tool).symlink_to(shutil.which(tool) or "")
        for tool in ("g++", "make", "patch", "apt-get"):
            self.has(tool)
        self.has("cmake", "echo cmake version 3.25.1")
        self._isolate()

    def _isolate(self) -> None:
        for name in [
            name for name in os.environ if name.startswith(("HOROVOD_", "CUDA_", "CXX", "VIRTUAL_ENV", "HVDTRAIN_"))
        ]:
            self._monkeypatch.delenv(name)
        self.set(PATH=f"{self.prefix}/bin:{self.bin}", SITE=str(self.packages), CALLS=str(self._calls))
        self.set(HVDTRAIN_WHEELS=str(self.folder / "wheels"))
        for name in CHECKS:
            self._monkeypatch.setattr(install, f"check_{name}", partial(self._launch, name))

    def _launch(self, name: str) -> Check:
        self.launched.append(name)
        return self.checks[name]

    def set(self, **variables: str) -> None:
        """Set environment variables."""
        for name, value in variables.items():
            self._monkeypatch.setenv(name, value)

    def has(self, tool: str, script: str = "exit 0", folder: Path | None = None) -> None:
        """Put a command on PATH."""
        path = (folder or self.bin) / tool
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def lacks(self, tool: str) -> None:
        """Take a command off PATH."""
        (self.bin / tool).unlink(missing_ok=True)

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


def builds(calls: list[str]) -> int:
    """Count the builds of Horovod among pip's calls."""
    return sum(" pip wheel " in f" {call} " for call in calls)
