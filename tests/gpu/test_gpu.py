"""Trainings on a GPU beside the same on the CPU; `launch/test.sh --gpu` runs them and prints their table (docs/gpu.md).

With `HVDTRAIN_GPU_TESTS=cpu` both sides run on the CPU: that shows that what they share works, and nothing of a GPU.
"""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.launching import Job, launched

HERE = os.environ.get("HVDTRAIN_GPU_TESTS", "gpu")
SCRIPT = str(Path(__file__).with_name("train.py"))
ROWS = ["| training | loss | on the CPU | accuracy | samples/s | times float32 |", "|---|---|---|---|---|---|"]


@pytest.fixture(scope="module")
def result_of(tmp_path_factory):
    """Return what a case prints, on a device; each is run once."""
    if HERE == "gpu" and (shutil.which("nvidia-smi") is None or os.environ.get("CUDA_VISIBLE_DEVICES") == ""):
        pytest.skip("there is no GPU")
    done = {}

    def result_of(case, device=HERE, ranks=1):
        if (case, device) not in done:
            hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            words = launched("gloo" if ranks > 1 else "none", ranks, SCRIPT, case)
            job = Job(words, cwd=tmp_path_factory.mktemp(case), **hidden).expect(timeout=600)
            lines = [line.partition("RESULT ")[2] for line in job.out.splitlines() if "RESULT " in line]
            assert len(lines) == ranks, job.text[-3000:]
            done[case, device] = json.loads(lines[0])
            if device == HERE:
                assert done[case, device]["gpus"] >= (HERE == "gpu")
                assert HERE.upper() in done[case, device]["placed"]
        return done[case, device]

    yield result_of
    for case in (case for case, device in done if device == HERE):
        here, there = done[case, HERE], done.get((case, "cpu"), {}).get("losses", [None])[-1]
        beside = f"{here['samples_per_second'] / done.get(('float32', HERE), here)['samples_per_second']:.2f}"
        loss = "" if there is None else f"{there:.5f}"
        figures = [f"{here['losses'][-1]:.5f}", loss, f"{here['accuracy']:.4f}", f"{here['samples_per_second']:.0f}"]
        ROWS.append(" | ".join(["| " + case, *figures, beside + " |"]))
    print("\n" + "\n".join(ROWS))


@pytest.mark.parametrize("case", ["float32", "jit", "mirrored"])
def test_a_training_in_32_bits_is_that_of_the_cpu(result_of, case):
    found, expected = result_of(case), result_of("float32", "cpu")
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=2 / 297)


@pytest.mark.parametrize("case", ["mixed_float16", "mixed_bfloat16"])
def test_16_bits_train_as_well(result_of, case):
    found, expected = result_of(case), result_of("float32", "cpu")
    assert found["losses"] == pytest.approx(expected["losses"], rel=0.05)
    assert found["accuracy"] == pytest.approx(expected["accuracy"], abs=0.02)


def test_a_resumed_training_ends_like_one_at_a_stretch(result_of):
    found, expected = result_of("checkpoint"), result_of("float32")
    assert found["losses"] == pytest.approx(expected["losses"][-len(found["losses"]) :], rel=1e-4)


def test_memory_is_taken_as_it_is_needed(result_of):
    assert result_of("float32")["grows"]


def test_two_ranks_share_a_gpu_where_horovod_has_no_nccl(result_of, tmp_path):
    if HERE == "gpu" and pytest.importorskip("horovod.tensorflow").nccl_built():
        said = "ncclCommInitRank failed: invalid usage"  # as docs/gpu.md says
        Job(launched("gloo", 2, SCRIPT, "shared"), cwd=tmp_path).expect(said, code=1, timeout=600)
        return
    found, expected = result_of("shared", ranks=2), result_of("shared", "cpu", ranks=2)
    assert found["equal"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-3)
    assert found["losses"][-1] < found["losses"][0] / 2
