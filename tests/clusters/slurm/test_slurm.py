"""Jobs of a real Slurm on two nodes: what a user submits, what Slurm does to them, and what comes of it."""

import io
import json
import re
import shutil
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pytest

from hvdtrain.checkpoint.naming import complete
from hvdtrain.runtime.launchers import expand_hosts
from tests.awake import awake_seconds
from tests.clusters.namespaces import NoHosts
from tests.clusters.slurm.cluster import cluster as made_cluster
from tests.launching import has_launcher

pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("slurm")]

ROOT = Path(__file__).parents[3]
PMIX = Path("/usr/lib/x86_64-linux-gnu/pmix2/lib/libpmix.so")
"""Which Debian's Slurm loads."""
SCRIPT = str(ROOT / "launch" / "slurm.sbatch")
TRAIN = ["digits", "--plots", "False", "--tensorboard", "False", "--checkpoint-every", "100000"]


@pytest.fixture(scope="module")
def cluster():
    if not has_launcher("horovodrun"):
        pytest.skip("Horovod is not installed")
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        with made_cluster(folder) as made:
            yield made
    except NoHosts as why:
        pytest.skip(str(why))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


SLOW_DIGITS = """\
import dataclasses, os, time
import tensorflow as tf
from hvdtrain.data.digits import load

class Slow:
    def __init__(self, source):
        self._source = source

    def __getattr__(self, name):
        return getattr(self._source, name)

    def gather(self, numbers):
        def wait(given):
            time.sleep(float(os.environ.get("SLOW", "0")))
            return given
        same = tf.ensure_shape(tf.numpy_function(wait, [numbers], numbers.dtype), numbers.shape)
        return self._source.gather(same)

def digits():
    splits = load()
    return dataclasses.replace(splits, train=Slow(splits.train))
"""
EPOCHS = 16
SLOWLY = [*TRAIN, "--data", "slow:digits", "--epochs", str(EPOCHS)]
ON_TWO_NODES = ["--nodes=2", "--ntasks-per-node=1"]


@pytest.fixture(scope="module")
def struck(cluster):
    """A job over Gloo that is slow, and whose time ends while it trains; under way."""
    (cluster.work / "slow.py").write_text(SLOW_DIGITS)
    limits = ["--time=10", "--signal=USR1@60"]
    job = cluster.submit(*ON_TWO_NODES, *limits, "--job-name=struck", SCRIPT, "--gloo", *SLOWLY, SLOW="0.1")
    cluster.wait_for_text(job, f"epoch  2/{EPOCHS}")
    # It is told of the end of its time now, and not a minute before the tenth.
    cluster.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    return job


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def weights_of(run):
    """The weights of a finished run, by name."""
    with zipfile.ZipFile(run / "model.keras") as archive:
        saved = io.BytesIO(archive.read("model.weights.h5"))
    with h5py.File(saved) as file:
        found = {}
        file.visititems(lambda path, item: found.update({path: item[()]}) if isinstance(item, h5py.Dataset) else None)
        return {path: array for path, array in found.items() if array.dtype.kind == "f" and "optimizer" not in path}


def test_lists_of_hosts_expand_as_slurm_expands_them(cluster):
    for text in ("host7", "host[1-3,07,010]", "a[08-11],b,c-[2,4-5]"):
        assert list(expand_hosts(text)) == cluster.run("scontrol", "show", "hostnames", text).split()


def test_srun_without_mpi_and_without_a_secret_is_refused_once(cluster):
    done = cluster.hosts.exec(
        1, ["srun", "--nodes=2", "--ntasks=2", "--mpi=none", sys.executable, "-m", "hvdtrain", "digits"],
        SLURM_CONF=str(cluster.folder / "slurm.conf"),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.count("hvdtrain: error: srun started 2 tasks without MPI") == 1, done.stderr
    assert "srun --mpi=pmix" in done.stderr
    assert "export HVDTRAIN_JOB_SECRET=$(od" in done.stderr


def test_three_ranks_on_two_nodes_train_as_one_process_does(cluster, struck):
    """Two ranks on one node, and one on the other, over Gloo; the last batch of 57 is uneven."""
    words = [*TRAIN, "--batch", "60", "--epochs", "1", "--model", "mlp"]
    words += ["--optimizer", "sgd", "--optimizer-args", "momentum", "0.9"]
    job = cluster.submit("--nodes=2", "--ntasks=3", "--job-name=uneven", SCRIPT, "--gloo", *words)
    one = ["srun", "--nodes=1", "--ntasks=1", "--mpi=none", sys.executable, "-m", "hvdtrain"]
    assert "1 rank by srun" in cluster.run(*one, *words, "--run-dir", "one", timeout=150)
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED", cluster.log(job)
    assert "horovod (gloo), 3 ranks by srun" in cluster.log(job)
    weights, expected = weights_of(cluster.work / "runs" / f"uneven-{job}"), weights_of(cluster.work / "one")
    assert weights.keys() == expected.keys()
    assert len(weights) >= 4
    largest = max(np.abs(array).max() for array in expected.values())
    for path, array in weights.items():
        assert np.abs(array - expected[path]).max() <= 1e-6 * largest, path


def test_the_example_trains_a_script_on_both_nodes(cluster):
    script = [str(ROOT / "examples" / "slurm.sbatch"), str(ROOT / "examples" / "image_folder.py"), "--epochs", "2"]
    job = cluster.submit("--nodes=2", "--ntasks-per-node=1", *script)
    assert cluster.wait_for_end(job)["JobState"] == "COMPLETED", cluster.log(job)
    assert "horovod (gloo), 2 ranks by srun" in cluster.log(job)
    assert complete(cluster.work / "checkpoints")


def test_each_job_of_an_array_trains_on_the_same_node(cluster):
    """Two jobs at once, whose ranks meet on one host."""
    words = [*TRAIN, "--epochs", "1"]
    job = cluster.submit(
        "--nodes=1", "--ntasks=2", "--nodelist=host2", "--array=1-2", "--job-name=array", SCRIPT, "--gloo", *words
    )
    for number in ("1", "2"):
        cluster.wait_for_end(f"{job}_{number}")
        assert summary_of(cluster.work / "runs" / f"array-{job}_{number}")["world_size"] == 2


def test_mpirun_trains_inside_an_allocation(cluster):
    words = [sys.executable, "-m", "hvdtrain", *TRAIN, "--epochs", "1", "--run-dir", "allocated"]
    allocation = ["salloc", *ON_TWO_NODES, "mpirun", "--bind-to", "none"]
    text = cluster.run(*allocation, *words, timeout=150)
    assert "horovod (mpi), 2 ranks by mpirun" in text


def test_a_job_that_is_cancelled_saves_and_is_not_queued_again(cluster):
    words = [*TRAIN, "--epochs", "10000"]
    job = cluster.submit(*ON_TWO_NODES, "--job-name=cancelled", SCRIPT, "--gloo", *words)
    cluster.wait_for_text(job, "epoch     2/10000")
    cluster.run("scancel", job)
    assert cluster.wait_for_end(job)["JobState"] == "CANCELLED"
    found = re.search(r"SIGTERM: all ranks stop after step (\d+), to save it", cluster.log(job))
    assert found is not None, cluster.log(job)[-3000:]
    step = int(found[1])
    saved = complete(cluster.work / "runs" / f"cancelled-{job}" / "checkpoints")
    assert saved[-1].name == f"step-{step:08d}"
    assert cluster.facts(job)["Restarts"] == "0"


def test_a_job_that_reaches_its_time_limit_goes_on_to_the_result_of_one_that_does_not(cluster, struck):
    """To the last bit, and over MPI, where Slurm has its plugin."""
    by = "mpi" if "pmix" in cluster.run("srun", "--mpi=list") and PMIX.exists() else "gloo"
    whole = cluster.submit(*ON_TWO_NODES, "--job-name=whole", SCRIPT, f"--{by}", *SLOWLY)
    cluster.wait(struck, lambda facts: facts["Restarts"] != "0", patience=90)
    # More time, unless it has needed none.
    longer = f"scontrol update JobId={struck} TimeLimit=10 || scontrol show job {struck} | grep JobState=COMPLETED"
    cluster.run("sh", "-c", longer)
    for job in (struck, whole):
        assert cluster.wait_for_end(job, patience=150)["JobState"] == "COMPLETED", cluster.log(job)
    text = cluster.log(struck)
    assert "horovod (gloo), 2 ranks by srun" in text
    assert f"horovod ({by}), 2 ranks by srun" in cluster.log(whole)
    step = int(re.search(r"SIGUSR1: all ranks stop after step (\d+), to save it", text)[1])
    found = summary_of(cluster.work / "runs" / f"struck-{struck}")
    assert found["resumed_from"] >= step > 0
    assert found["parameter_hash"] == summary_of(cluster.work / "runs" / f"whole-{whole}")["parameter_hash"]
    if by == "gloo":
        pytest.skip("not over MPI: Slurm's PMIx plugin finds no libpmix.so (package libpmix-dev)")


def processes_of_jobs(cluster):
    lines = [line for number in (1, 2) for line in cluster.hosts.processes(number)]
    return [line for line in lines if "hvdtrain" in line and "munged" not in line]


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left(cluster):
    """No process of a job outlives it."""
    yield
    cluster.run("scancel", "--user=root")
    limit = awake_seconds() + 60
    while cluster.run("squeue", "--noheader"):
        assert awake_seconds() < limit
        time.sleep(0.3)
    while left := processes_of_jobs(cluster):
        assert awake_seconds() < limit, left
        time.sleep(0.3)


def test_launch_becomes_the_srun_of_its_allocation(cluster):
    script = cluster.work / "launched.sh"
    words = "digits --max-steps 2 --run-dir runs/launched"
    launch = f"python -m hvdtrain launch --run --gloo {words}"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH --output=%x-%j.log\n{launch}\n")
    job = cluster.submit("--job-name=launched", str(script))
    ended = cluster.wait_for_end(job)
    log = cluster.log(job)
    assert ended["JobState"] == "COMPLETED", log
    assert f"hvdtrain: Slurm's job {job}: Gloo straight from srun" in log
    assert "backend     horovod (gloo), 2 ranks by srun" in log
