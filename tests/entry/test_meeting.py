"""Ranks that nobody but a scheduler has started: the pods of an Indexed Job, as processes of this machine."""

import contextlib
import os
import re
import secrets
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from tests.awake import awake_seconds
from tests.launching import Job, has_launcher, hvdtrain, summary_of

pytestmark = [
    pytest.mark.extended,
    pytest.mark.xdist_group("meeting"),
    pytest.mark.skipif(not has_launcher("horovodrun"), reason="Horovod is not installed"),
]

MANIFEST = Path(__file__).parents[2] / "launch" / "kubernetes" / "indexed-job-gloo.yaml"
SECRET = secrets.token_hex(16)
FACE = """
import sys
import numpy as np
import tensorflow as tf
import hvdtrain.horovod as hvd

hvd.init()
assert hvd.gloo_enabled() and not hvd.mpi_enabled()
total = hvd.allreduce(tf.constant([1.0 + hvd.rank()]), op=hvd.Sum)
print("rank", hvd.rank(), "of", hvd.size(), "sum", float(total[0]), flush=True)
"""
STRUCK = """
import os, sys
import keras
import numpy as np
import hvdtrain

hvdtrain.init(hang_timeout=30)
x = np.random.default_rng(0).standard_normal((64, 5)).astype("float32")
trainer = hvdtrain.Trainer(keras.Sequential([keras.Input((5,)), keras.layers.Dense(4)]), "adam", "mse")

def strike(epoch, logs):
    if epoch == 3 and hvdtrain.rank() == int(sys.argv[2]):
        os.kill(os.getpid(), 9) if sys.argv[1] == "kill" else sys.exit(3)

trainer.fit(x, x[:, :4], batch=16, epochs=100_000, callbacks=[keras.callbacks.LambdaCallback(on_epoch_end=strike)])
"""


class Pods:
    """The pods of a Job, with the variables that its manifest and Kubernetes give them."""

    def __init__(self, words, cwd, size=2, ranks=None, **environ):
        _, job = yaml.safe_load_all(MANIFEST.read_text())
        container = job["spec"]["template"]["spec"]["containers"][0]
        given = {each["name"]: each.get("value", "") for each in container["env"]}
        # They have no names of their own here; all else is as in the cluster.
        given |= {"JOB_COMPLETIONS": str(size), "HVDTRAIN_JOB_SECRET": SECRET, "HVDTRAIN_RENDEZVOUS_HOST": "127.0.0.1"}
        given |= environ
        self.jobs = []
        for index in range(size) if ranks is None else ranks:
            own = {"JOB_COMPLETION_INDEX": str(index), "HOSTNAME": f"{cwd.name}-{index}"}
            self.jobs.append(Job([sys.executable, *words], cwd=cwd, **given, **own))
        self.processes = [job.process for job in self.jobs]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for job in self.jobs:
            job.__exit__()

    @property
    def text(self):
        return "".join(job.text for job in self.jobs)

    def wait_for(self, text, patience=90.0):
        begin = awake_seconds()
        while text not in self.text and awake_seconds() - begin < patience:
            assert all(process.poll() is None for process in self.processes), self.text[-3000:]
            time.sleep(0.1)
        assert text in self.text, self.text[-3000:]

    def end(self, patience=120.0):
        """The exit code of each pod; nothing of it is left."""
        children = [child for each in self.processes for child in _below(each.pid)]
        codes = [process.wait(patience) for process in self.processes]
        _, alive = psutil.wait_procs(children, timeout=60)
        assert alive == []
        return codes


def _below(pid):
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def hash_of(run):
    return summary_of(run)["parameter_hash"]


WORDS = ["-m", "hvdtrain", "digits", "--plots", "False", "--tensorboard", "False", "--epochs", "10"]
WORDS += ["--threads", "1"]  # each pod takes itself for a machine with all of its cores


def test_pods_that_are_taken_away_and_started_again_train_as_horovodrun_does(tmp_path):
    words = [*WORDS, "--run-dir", "run", "--resume", "auto", "--checkpoint-every", "100000"]
    with Pods(words, tmp_path) as pods:
        pods.wait_for("epoch  2/10")
        os.kill(pods.processes[1].pid, signal.SIGTERM)
        assert pods.end() == [75, 75], pods.text[-3000:]
        first = pods.text
    with Pods(words, tmp_path) as pods:
        assert pods.end() == [0, 0], pods.text[-3000:]
    assert "backend     horovod (gloo), 2 ranks by kubernetes" in first
    assert len(re.findall(r"SIGTERM: all ranks stop after step \d+, to save it", first)) == 1
    hvdtrain("gloo", 2, *WORDS[2:], "--run-dir", "whole", cwd=tmp_path)
    assert hash_of(tmp_path / "run") == hash_of(tmp_path / "whole"), "the same to the last bit"
    for file in (tmp_path / "run").rglob("*"):
        assert file.is_dir() or SECRET.encode() not in file.read_bytes(), file
    assert SECRET not in first


def test_a_script_with_horovods_own_init_meets_as_well(tmp_path):
    with Pods(["-c", FACE], tmp_path, size=3) as pods:
        assert pods.end() == [0, 0, 0], pods.text[-3000:]
        for rank in range(3):
            assert f"rank {rank} of 3 sum 6.0" in pods.text


@pytest.mark.parametrize(
    ("what", "rank", "codes", "named"),
    [
        ("exit", 1, [1, 3], "sys.exit(3) at"),
        ("kill", 0, [-9, 1], "rank 0, which keeps the store of the job, is gone: killed, or its machine is gone"),
    ],
)
def test_one_rank_that_fails_ends_the_others(tmp_path, what, rank, codes, named):
    (tmp_path / "script.py").write_text(STRUCK)
    with Pods(["script.py", what, str(rank)], tmp_path) as pods:
        assert pods.end() == codes, pods.text[-3000:]
        assert named in pods.text
        assert pods.text.count("Traceback (most recent call last)") <= 1, pods.text[-3000:]


def test_a_rank_that_does_not_come_is_named_and_one_without_rank_0_says_where_it_searched(tmp_path):
    given = {"HVDTRAIN_RENDEZVOUS_TIMEOUT": "15"}
    with Pods(WORDS, tmp_path, size=3, ranks=(0, 1), **given) as pods:
        assert set(pods.end()) == {2}
        assert "No message from rank 2 of 3 within 15 s" in pods.text
    given = {"HVDTRAIN_RENDEZVOUS_TIMEOUT": "4"}
    with Pods(WORDS, tmp_path, ranks=(1,), **given) as pods:
        assert pods.end() == [2]
        assert "Rank 0 was not found on 127.0.0.1 within 4 s" in pods.text
