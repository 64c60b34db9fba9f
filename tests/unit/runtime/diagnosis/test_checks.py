"""The checks of `hvdtrain doctor`, one by one, with findings that are right and wrong."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.runtime.diagnosis import diagnose, machine
from hvdtrain.runtime.diagnosis.machine import GIB, MIB, cpu_quota, memory_limits, ok, read_machine
from hvdtrain.runtime.horovod_patches import patched_version, series_hashes

TENSORFLOW = {"version": "2.21.0", "gpus": 0}
HOROVOD = {"version": patched_version(), "patches": series_hashes(), "built_for": "2.21.0"}
HOROVOD |= {"gloo": True, "mpi": True, "nccl": 0, "cuda": False}
OPEN_MPI = "Open MPI v4.1.8, package: Open MPI user@localhost, ident: 4.1.8, repo rev: v4.1.8, Feb 04, 2025"


Program = Callable[[str, str], None]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    """Put a program that prints a text first on PATH."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def make(name: str, text: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)

    return make


class TestSoftware:
    @pytest.mark.parametrize(
        ("version", "status"),
        [((3, 10, 9), "failed"), ((3, 11, 2), "ok"), ((3, 13, 0), "ok"), ((3, 14, 0), "failed"), ((4, 0), "failed")],
    )
    def test_python(self, version: tuple[int, ...], status: str) -> None:
        assert diagnose.check_python(version).status == status

    @pytest.mark.parametrize(
        ("found", "status", "detail"),
        [
            (TENSORFLOW, "ok", "2.21.0"),
            ({"missing": True}, "failed", "not installed"),
            ({"version": "2.20.1", "gpus": 0}, "failed", "2.20.1"),
            ({"version": "2.2.1", "gpus": 0}, "failed", "2.2.1"),
            ({"error": "ImportError: libfoo"}, "failed", "libfoo"),
        ],
    )
    def test_tensorflow(self, found: dict[str, Any], status: str, detail: str) -> None:
        check = diagnose.check_tensorflow(found)
        assert (check.status, bool(check.fix)) == (status, status != "ok")
        assert detail in check.detail

    @pytest.mark.parametrize(
        ("found", "status", "detail"),
        [
            ({"version": "3.15.1", "backend": "tensorflow"}, "ok", "3.15.1"),
            ({"version": "3.12.4", "backend": "tensorflow"}, "warning", "not tested with it"),
            ({"version": "3.15.1", "backend": "jax"}, "failed", "jax"),
            ({"version": "2.15.0", "backend": "tensorflow"}, "failed", "needs Keras 3"),
            ({"missing": True}, "failed", "not installed"),
            ({"error": "ModuleNotFoundError: No module named 'torch'"}, "failed", "torch"),
        ],
    )
    def test_keras(self, found: dict[str, Any], status: str, detail: str) -> None:
        check = diagnose.check_keras(found)
        assert (check.status, bool(check.fix)) == (status, status != "ok")
        assert detail in check.detail

    @pytest.mark.parametrize(
        ("change", "status", "detail"),
        [
            ({}, "ok", "0.28.1"),
            ({"built_for": None}, "ok", "not recorded"),
            ({"built_for": "2.20.0"}, "failed", "2.20.0, but 2.21.0 is installed"),
            ({"built_for": "2.21.1"}, "warning", "2.21.1"),
            (
                {"version": "0.28.1", "patches": {}},
                "warning",
                "2.21.0; of hvdtrain's patches",
            ),
            ({"patches": {"0001-x": "0"}}, "warning", "has, besides, 0001-x"),
            ({"error": "NotFoundError: undefined symbol: _ZN3tsl"}, "failed", "undefined symbol"),
            ({"missing": True}, "warning", "one process only"),
        ],
    )
    def test_horovod(self, change: dict[str, Any], status: str, detail: str) -> None:
        check = diagnose.check_horovod(HOROVOD | change, TENSORFLOW)
        assert (check.status, diagnose.SETUP in check.fix) == (status, status != "ok")
        assert detail in check.detail

    @pytest.mark.parametrize(
        ("gloo", "mpi", "status", "detail"),
        [
            (True, True, "ok", "Gloo and MPI"),
            (True, False, "ok", "Gloo; MPI is not built"),
            (False, True, "ok", "MPI; Gloo is not built"),
            (False, False, "failed", "neither"),
        ],
    )
    def test_controllers(self, gloo: bool, mpi: bool, status: str, detail: str) -> None:
        check = diagnose.check_controllers(HOROVOD | {"gloo": gloo, "mpi": mpi})
        assert check.status == status
        assert detail in check.detail

    @pytest.mark.parametrize(
        ("text", "identity"),
        [
            (OPEN_MPI, "Open MPI 4.1.8"),
            ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/", "Open MPI 4.1.8"),
            ("MPICH Version:      4.3.0\nMPICH Release date: Mon Feb", "MPICH 4.3.0"),
            ("HYDRA build details:\n    Version:                                 4.3.0\n", "MPICH 4.3.0"),
            ("Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005", "Intel MPI 2021.11"),
            ("Intel(R) MPI Library 2021.11 for Linux* OS", "Intel MPI 2021.11"),
            ("something else 1.2", ""),
        ],
    )
    def test_what_an_mpi_says_of_itself(self, text: str, identity: str) -> None:
        assert " ".join(machine.mpi_identity(text) or ()) == identity

    @pytest.mark.parametrize(
        ("mpirun", "mpi4py", "status", "detail"),
        [
            ("mpirun (Open MPI) 4.1.8", {"library": OPEN_MPI}, "ok", "Open MPI 4.1.8 (mpirun and mpi4py)"),
            (
                "mpirun (Open MPI) 4.1.4",
                {"library": OPEN_MPI},
                "failed",
                "mpirun of Open MPI 4.1.4, mpi4py on Open MPI 4.1.8",
            ),
            ("HYDRA build details: Version: 4.3.0", {"library": OPEN_MPI}, "failed", "MPICH 4.3.0"),
            ("home made", {"library": OPEN_MPI}, "ok", "unknown make"),
            ("mpirun (Open MPI) 4.1.8", {"missing": True}, "failed", "mpi4py is not installed"),
            ("mpirun (Open MPI) 4.1.8", {"error": "ImportError: libmpi.so"}, "failed", "libmpi.so"),
        ],
    )
    def test_mpi(self, program: Program, mpirun: str, mpi4py: dict[str, Any], status: str, detail: str) -> None:
        program("mpirun", mpirun)
        check = diagnose.check_mpi_library(HOROVOD, mpi4py)
        assert check.status == status
        assert detail in check.detail

    def test_mpirun_missing(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        check = diagnose.check_mpi_library(HOROVOD, {"library": OPEN_MPI})
        assert (check.status, "mpirun is not on PATH" in check.detail) == ("failed", True)
        assert diagnose.check_mpi_library(HOROVOD | {"mpi": False}, {"missing": True}).status == "ok"


class TestHost:
    def test_cores(self) -> None:
        facts = replace(read_machine(), cores=8, usable_cores=4, cpu_quota=None)
        assert machine.check_cores(facts, {}) == ok("Cores", "4 of 8 usable")
        assert "OMP_NUM_THREADS=3" in machine.check_cores(facts, {"OMP_NUM_THREADS": "3"}).detail
        limited = machine.check_cores(replace(facts, cpu_quota=1.5), {})
        assert (limited.status, "time of 1.5" in limited.detail) == ("warning", True)
        assert machine.check_cores(replace(facts, cpu_quota=4.0), {}).status == "ok"

    @pytest.mark.parametrize(("available", "status"), [(GIB, "warning"), (3 * GIB, "ok")])
    def test_memory(self, available: int, status: str) -> None:
        assert machine.check_memory(replace(read_machine(), available_memory=available)).status == status

    @pytest.mark.parametrize(
        ("total", "free", "status"),
        [
            (64 * MIB, 64 * MIB, "ok"),
            (63 * MIB, 63 * MIB, "warning"),
            (GIB, 10 * MIB, "warning"),
            (None, None, "warning"),
        ],
    )
    def test_shm(self, total: int | None, free: int | None, status: str) -> None:
        check = machine.check_shm(replace(read_machine(), shm=total, shm_free=free))
        assert (check.status, bool(check.fix)) == (status, status != "ok")

    def test_the_key_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        key = tmp_path / "job.key"
        assert machine.check_key(key).status == "ok"
        key.write_bytes(b"k" * 32)
        key.chmod(0o600)
        assert machine.check_key(key).status == "ok"
        key.chmod(0o640)
        assert (machine.check_key(key).status, "0640" in machine.check_key(key).detail) == ("failed", True)
        key.chmod(0o600)
        monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
        assert "belongs to user" in machine.check_key(key).detail

    def test_the_tightest_quota_counts(self, tmp_path: Path) -> None:
        (tmp_path / "job/step").mkdir(parents=True)
        membership = tmp_path / "membership"
        membership.write_text("0::/job/step\n")
        assert cpu_quota(tmp_path, membership) is None
        (tmp_path / "job/step/cpu.max").write_text("max 100000\n")
        assert cpu_quota(tmp_path, membership) is None
        (tmp_path / "job/cpu.max").write_text("150000 100000\n")
        (tmp_path / "cpu.max").write_text("400000 100000\n")
        assert cpu_quota(tmp_path, membership) == 1.5

    def test_quota_of_version_1(self, tmp_path: Path) -> None:
        (tmp_path / "cpu").mkdir()
        (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
        assert cpu_quota(tmp_path, tmp_path / "none") is None
        (tmp_path / "cpu/cpu.cfs_quota_us").write_text("50000\n")
        assert cpu_quota(tmp_path, tmp_path / "none") == 0.5

    def test_memory_limits(self, tmp_path: Path) -> None:
        (tmp_path / "memory.max").write_text("max\n")
        assert memory_limits(tmp_path, tmp_path / "none") == []
        (tmp_path / "memory.max").write_text("1000\n")
        (tmp_path / "memory.current").write_text("400\n")
        assert memory_limits(tmp_path, tmp_path / "none") == [(1000, 400)]
