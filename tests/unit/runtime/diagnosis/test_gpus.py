"""What doctor says of GPUs, on machines made of stubs; what it runs on them runs on CPUs in tests/entry."""

import json
import shutil

import pytest

from hvdtrain.runtime import selfcheck
from hvdtrain.runtime.diagnosis import diagnose
from hvdtrain.runtime.diagnosis.machine import Check, ok

TENSORFLOW = {"version": "2.21.0", "gpus": 2}
HOROVOD = {"version": "0.28.1", "gloo": True, "mpi": True, "nccl": 23203, "cuda": True}
SMI = "| NVIDIA-SMI {driver}              Driver Version: {driver}      CUDA Version: {cuda}     |"
REPORT = {
    "ok": True,
    "size": 2,
    "device": "NVIDIA H100 80GB HBM3",
    "nccl": True,
    "losses": {"float32": [4.0, 0.5], "float16": [4.0, 0.51]},
    "gigabytes_per_second": 123.4,
    "wrong_elements": 0,
}


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Puts a shell script on PATH, which holds nothing else but the shell's own tools."""
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setattr(diagnose, "beside_python", shutil.which)

    def put(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    return put


def has_driver(program, driver="580.65.06", cuda="13.0"):
    program("nvidia-smi", f"echo '{SMI.format(driver=driver, cuda=cuda)}'")


def trains(program, **changes):
    report = json.dumps(REPORT | changes)
    program("horovodrun", f"echo '{report}'; exit {0 if (REPORT | changes)['ok'] else 1}")


def checks(**changes) -> dict[str, Check]:
    found = diagnose.check_gpus(TENSORFLOW | changes, HOROVOD)
    return {check.name: check for check in found}


def test_none(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert list(diagnose.check_gpus({"version": "2.21.0", "gpus": 0}, HOROVOD)) == [ok("GPUs", "none")]


def test_all_is_well(program):
    has_driver(program)
    trains(program)
    found = checks()
    assert {check.status for check in found.values()} == {"ok"}
    assert found["GPU driver"].detail == "580.65.06, for CUDA 13"
    assert found["GPUs"].detail == "2; Horovod reduces on them by NCCL 2.32.3"
    assert "NVIDIA H100" in found["2 GPUs, training"].detail
    assert "123.4 GB/s" in found["2 GPUs, training"].detail


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo NVIDIA-SMI has failed because it could not talk to the driver; exit 9", "could not talk to the driver"),
        (
            f"echo '{SMI.format(driver='470.1', cuda='11.4')}'",
            "470.1, for CUDA 11; TensorFlow 2.21 needs 12",
        ),
    ],
)
def test_a_driver_that_does_not_do(program, script, said):
    program("nvidia-smi", script)
    check = checks(gpus=0)["GPU driver"]
    assert check.status == "failed"
    assert said in check.detail


def test_tensorflow_without_cuda(program):
    has_driver(program)
    check = checks(gpus=0)["GPUs"]
    assert (check.status, "tensorflow[and-cuda]" in (check.fix or "")) == ("warning", True)


def test_horovod_without_nccl_is_not_tried(program):
    has_driver(program)
    found = {check.name: check for check in diagnose.check_gpus(TENSORFLOW, HOROVOD | {"nccl": 0})}
    assert found["GPUs"].status == "warning"
    assert "setup --gpu" in (found["GPUs"].fix or "")
    assert len(found) == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ok": False, "error": "InternalError: NCCL: unhandled cuda error"}, "unhandled cuda error"),
        ({"ok": False, "wrong_elements": 7}, "wrong in 7 elements"),
        (
            {"ok": False, "losses": {"float32": [4.0, 0.5], "float16": [4.0, 3.0]}},
            "in float32 and to 3.0",
        ),
        ({"size": 1}, "1 ranks trained on NVIDIA"),
        ({"device": "CPU"}, "trained on CPU"),
    ],
)
def test_training_that_goes_wrong(program, changes, said):
    has_driver(program)
    trains(program, **changes)
    check = checks()["2 GPUs, training"]
    assert check.status == "failed"
    assert said in check.detail
    assert "NCCL_DEBUG=INFO horovodrun -np 2" in (check.fix or "")


@pytest.mark.parametrize(
    ("half", "alike"), [((4.0, 0.5), True), ((4.0, 0.59), False), ((4.0, float("nan")), False), ((4.0, 0.4), False)]
)
def test_learning_alike(half, alike):
    assert selfcheck.learns_alike({"float32": (4.0, 0.5), "float16": half}) == alike


def test_a_network_that_does_not_learn_is_not_right():
    assert not selfcheck.learns_alike({"float32": (4.0, 4.0), "float16": (4.0, 4.0)})
