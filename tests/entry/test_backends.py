"""`--backend` as a user types it: the same recipe trains to the same loss on every one."""

import json

import pytest

from tests.launching import hvdtrain

pytestmark = pytest.mark.xdist_group("backends")  # one process makes the run that the others are held against
STEPS = "20"


def trained(controller, size, *words, cwd):
    job = hvdtrain(controller, size, *words, cwd=cwd)
    assert job.code == 0, job.text[-4000:]
    return job, json.loads((cwd / "run" / "summary.json").read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    words = ("digits", "--backend", "single", "--max-steps", STEPS, "--run-dir", "run")
    return trained("none", 1, *words, cwd=tmp_path_factory.mktemp("single"))[1]


def assert_same(summary, reference):
    assert summary["steps"] == reference["steps"] == int(STEPS)
    assert summary["train_loss"] == pytest.approx(reference["train_loss"], rel=1e-5)
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)
    assert summary["val_accuracy"] == reference["val_accuracy"]


def test_replicas_of_one_process_go_on_where_they_were(tmp_path, reference):
    words = ("--checkpoint-every", "8", "--run-dir", "run")
    job, first = trained(
        "none", 1, "digits", "--backend", "mirrored", "--replicas", "4", "--max-steps", "8", *words, cwd=tmp_path
    )
    assert "backend     mirrored, 4 replicas" in job.out
    assert "batch       64 samples, 16 per replica" in job.out
    assert (first["backend"], first["world_size"]) == ("mirrored", 4)
    # Another backend goes on with what one has saved.
    _, summary = trained(
        "none", 1, "--resume", "run", "--backend", "central_storage", "--replicas", "2", "--max-steps", STEPS,
        cwd=tmp_path,
    )  # fmt: skip
    assert (summary["backend"], summary["world_size"], summary["resumed_from"]) == ("central_storage", 2, 8)
    assert summary["val_loss"] == pytest.approx(reference["val_loss"], rel=1e-5)


def test_workers_find_one_another_under_any_launcher(tmp_path, reference):
    words = ("digits", "--backend", "multi_worker_mirrored", "--communication", "ring", "--max-steps", STEPS)
    job, summary = trained("gloo", 2, *words, "--run-dir", "run", cwd=tmp_path)
    assert "backend     multi_worker_mirrored (ring), 2 ranks by horovodrun" in job.out
    assert (summary["backend"], summary["world_size"]) == ("multi_worker_mirrored", 2)
    assert_same(summary, reference)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "tpu"), "There is no TPU"),
        (("--backend", "mirrored", "--compression", "bf16"), "--compression is not for --backend mirrored"),
    ],
)
def test_what_a_backend_cannot_do_is_said_in_one_line(tmp_path, words, said):
    job = hvdtrain("none", 1, "digits", *words, cwd=tmp_path)
    assert job.code == 2
    assert said in job.err
    assert "Traceback" not in job.text
    assert len(job.err.strip().splitlines()) == 1, job.err
