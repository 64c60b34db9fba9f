"""The module that each Python of an environment with PyPI's Open MPI runs as it starts."""

import ctypes
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain import installation

MODULE = Path(installation.__file__).with_name("openmpi_startup.py")
ISOLATED = "OMPI_MCA_ess_singleton_isolated"


@pytest.fixture
def start(monkeypatch):
    """Run the module with some environment variables; returns the finder that it adds."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def run(**environ):
        monkeypatch.setattr(os, "environ", environ)
        runpy.run_path(str(MODULE))
        return sys.meta_path[0]

    return run


@pytest.fixture
def loaded(monkeypatch, tmp_path):
    """Libraries that are loaded, with their modes; a library of Open MPI is in the environment."""
    calls = []
    monkeypatch.setattr(ctypes, "CDLL", lambda path, mode: calls.append((path, mode)))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/libmpi.so.40").touch()
    return calls


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {ISOLATED: "1"}),
        ({ISOLATED: "0"}, {ISOLATED: "0"}),
        ({"OPAL_PREFIX": "/opt/mine"}, {"OPAL_PREFIX": "/opt/mine"}),
    ],
)
def test_needs_no_daemon_unless_the_user_has_set_otherwise(start, before, after):
    start(**before)
    assert os.environ == after


def test_the_library_is_bound_when_it_is_loaded_for_mpi4py(start, loaded):
    finder = start()
    for name in ("mpi4py", "mpi4py.rc", "tensorflow"):
        assert finder.find_spec(name, None, None) is None
    assert loaded == []
    assert finder.find_spec("mpi4py.MPI", ["/a/folder"], None) is None
    assert loaded == [(f"{sys.prefix}/lib/libmpi.so.40", os.RTLD_NOW | os.RTLD_LOCAL)]


def test_another_library_is_left_alone(start, loaded):
    start(MPI4PY_LIBMPI="/usr/lib/libmpi.so").find_spec("mpi4py.MPI")
    Path(sys.prefix, "lib/libmpi.so.40").unlink()  # Open MPI was uninstalled
    start().find_spec("mpi4py.MPI")
    assert loaded == []


def test_imports_nothing_but_what_python_has_loaded():
    code = "import os, sys; before = set(sys.modules); exec(sys.argv[1]); print(set(sys.modules) - before)"
    command = [sys.executable, "-S", "-c", code, MODULE.read_text()]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "set()\n"
