"""Jobs on several hosts that share no folder: started by ssh, trained as on one host, ended where a link breaks."""

import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.clusters.namespaces import NoHosts, hosts

FLOAT32 = 1e-6
SCRIPT = Path(__file__).parent / "script_of_user.py"
APART = Path(__file__).parents[1] / "entry" / "elastic_jobs" / "apart.py"
MODEL = """
import keras

def net(sample_shape, classes):
    layers = [keras.Input(sample_shape), keras.layers.Flatten(), keras.layers.Dense(classes, "softmax")]
    return keras.Sequential(layers)

net.loss = "sparse_categorical_crossentropy"
"""
DOCKER = "ip link add docker0 type bridge; ip addr add 172.17.0.1/16 dev docker0; ip link set docker0 up"
"""What every host with Docker has: a bridge of its own, with the same address."""
HVDTRAIN = ["python", "-m", "hvdtrain"]
TRAIN = ["python", "-m", "hvdtrain", "digits"]
PROBES = {
    f"OMPI_MCA_oob_tcp_keepalive_{name}": value for name, value in {"time": "5", "intvl": "2", "probes": "3"}.items()
}
"""For the mpirun of a system: that of the environment has these settings in its file."""
pytestmark = [pytest.mark.extended, pytest.mark.xdist_group("hosts")]


@pytest.fixture(scope="module")
def three():
    pytest.importorskip("horovod", reason="horovod is not installed")
    try:
        with hosts(3) as made:
            for number in (1, 2, 3):
                shutil.copy(SCRIPT, made.disk(number) / "train.py")
                made.exec(number, ["sh", "-c", DOCKER])
            yield made
    except NoHosts as why:
        pytest.skip(str(why))


def gloo(places, *command):
    return ["horovodrun", "--gloo", "-np", str(_ranks(places)), "-H", places, *command]


def mpirun(places, *command):
    # By its whole path it finds its helper on the other hosts, which have not activated the environment.
    program = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:/usr/bin")
    if program is None:
        pytest.skip("mpirun is not installed")
    return [program, "--oversubscribe", "--bind-to", "none", "-np", str(_ranks(places)), "-H", places, *command]


def _ranks(places):
    return sum(int(place.partition(":")[2]) for place in places.split(","))


def run(here, command, code=0, timeout=400, **environ):
    done = here.exec(1, command, timeout=timeout, **PROBES, **environ)
    assert done.returncode == code, f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout + done.stderr


def weights_of(here, name="trained"):
    with np.load(here.disk(1) / "weights.npz") as kept:
        return kept[name]


def clear(here):
    for number in range(1, len(here.holders) + 1):
        for name in ("backup", "checkpoints", "weights.npz", "run", "other", "cut"):
            path = here.disk(number) / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def written(here, number):
    """Return what a job has left in a host's working folder, but for the logs of its ranks there."""
    own = {"train.py", "tmp", "here.yaml", "hosts.txt", "models.py", "table.csv", "photos", ".cache"}
    found = {path.name for path in here.disk(number).iterdir() if not path.name.startswith(".")} - own
    return {name for name in found if not holds_logs_alone(here.disk(number) / name)}


def holds_logs_alone(path):
    files = [file for file in path.rglob("*") if file.is_file()]
    return bool(files) and all(re.fullmatch(r"logs/rank-\d\.log", str(file.relative_to(path))) for file in files)


@pytest.fixture(scope="module")
def alone(three):
    """The weights that one process trains to."""
    run(three, ["python", "train.py"])
    trained, begun = weights_of(three), weights_of(three, "begun")
    assert np.abs(trained - begun).max() > 1e-2
    return trained


@pytest.mark.parametrize(
    ("start", "places"),
    [(gloo, "host1:2,host2:1,host3:1"), (mpirun, "host1:2,host2:2")],
    ids=["horovodrun, 3 hosts", "mpirun, 2 hosts"],
)
def test_a_script_trains_on_several_hosts_as_on_one(three, alone, start, places):
    clear(three)
    run(three, start(places, "python", "train.py"))
    for name in ("trained", "backed_up"):
        assert np.abs(weights_of(three, name) - alone).max() <= FLOAT32 * np.abs(alone).max(), name
    assert "weights.npz" in written(three, 1)
    assert written(three, 2) == written(three, 3) == set()  # only the primary writes


# --- files that only the first host has ---


@pytest.fixture(scope="module")
def trained(three):
    """A run in the folder of the first host, whose configuration no other host has."""
    clear(three)
    (three.disk(1) / "here.yaml").write_text("recipe: digits\ntraining: {max_steps: 10}\n")
    (three.disk(1) / "hosts.txt").write_text("# two of them\nhost1 slots=1\nhost2:1\n")
    launch = [*HVDTRAIN, "launch", "--run", "--gloo", "--hostfile", "hosts.txt"]
    run(three, [*launch, "--config", "here.yaml", "--run-dir", "run"])
    assert json.loads((three.disk(1) / "run" / "summary.json").read_text())["world_size"] == 2
    return three.disk(1) / "run"


def test_a_run_of_the_first_host_is_resumed_and_evaluated_on_all(three, trained):
    over_all = ["host1:2,host2:1,host3:1", *HVDTRAIN]
    said = run(three, gloo(*over_all, "--resume", "run", "--max-steps", "23", "--hierarchical-allreduce", "always"))
    assert "gradients are summed inside each host first, then between the 3 hosts" in said
    summary = json.loads((trained / "summary.json").read_text())
    run(three, gloo(*over_all, "evaluate", "run"))
    evaluated = json.loads((trained / "evaluation.json").read_text())
    assert evaluated["step"] == 23
    assert evaluated["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-5)
    done = run(three, gloo(*over_all, *TRAIN[3:], "--max-steps", "23", "--run-dir", "run", "--resume", "auto"))
    assert "is finished" in done
    options = ["--backend", "multi_worker_mirrored", "--max-steps", "23", "--run-dir", "other"]
    run(three, gloo(*over_all, *TRAIN[3:], *options))
    other = json.loads((three.disk(1) / "other" / "summary.json").read_text())
    assert other["val_loss"] == pytest.approx(summary["val_loss"], rel=1e-4)
    assert written(three, 2) == written(three, 3) == set()


def test_what_a_run_predicts_on_several_hosts_is_what_it_predicts_on_one(three, trained):
    samples = np.random.default_rng(0).integers(0, 17, (11, 8, 8, 1)).astype("float32")
    for number in (1, 2):
        np.save(three.disk(number) / "tmp" / "new.npy", samples)
    words = [*HVDTRAIN, "predict", "run", "tmp/new.npy", "--probabilities", "--checkpoint", "10", "--out"]
    run(three, gloo("host1:1,host2:1", *words, "run/two.csv"))
    run(three, [*words, "run/one.csv"])
    one, two = ((trained / name).read_text().splitlines() for name in ("one.csv", "two.csv"))
    assert one[0] == two[0]
    assert len(one) == len(two) == 12
    for left, right in zip(one[1:], two[1:], strict=True):
        kept = [line.split(",") for line in (left, right)]
        assert kept[0][:2] == kept[1][:2]
        np.testing.assert_allclose(*(np.array(fields[2:], "float64") for fields in kept), atol=1e-5)
    assert written(three, 2) == set()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "models:net"], r"there is no module 'models'.*rank 1 \(host2\)"),
        (["--data", "csv", "--data-args", "path", "table.csv", "target", "z"], r"no \S+/table\.csv.*rank 1 \(host2\)"),
    ],
    ids=["model", "data"],
)
def test_what_another_host_lacks_ends_the_job_and_names_the_host(three, words, message):
    (three.disk(1) / "models.py").write_text(MODEL)
    (three.disk(1) / "table.csv").write_text("x,y,z\n" + "".join(f"{i},{i % 3},{i % 2}\n" for i in range(99)))
    said = run(three, gloo("host1:1,host2:1", *TRAIN, *words, "--max-steps", "3", "--run-dir", "lacking"), code=2)
    assert re.search(message, said, re.DOTALL), said


@pytest.mark.parametrize(
    ("interface", "message"),
    [
        ("ib0", r"Received: ib0\. This host has eth0 \(10\.213\.78\.1\), docker0 \(172\.17\.0\.1\)"),
        ("docker0", r"store at 172\.17\.\S+ does not answer.*--network-interfaces.*eth0 \(10\.213\.78\.2\).*\(host2\)"),
    ],
    ids=["missing", "of this host alone"],
)
def test_interfaces_that_do_not_lead_to_the_other_hosts_are_told_with_those_that_might(three, interface, message):
    command = gloo("host1:1,host2:1", *TRAIN, "--max-steps", "3", "--run-dir", "lacking")
    said = run(three, [*command[:2], "--network-interfaces", interface, *command[2:]], code=2)
    assert re.search(message, said, re.DOTALL), said


# --- a link that breaks ---


def listened_to(job, word):
    """Return the lines of a job, as they come, an event that is set when one has `word`, and its readers."""
    said, heard = [], threading.Event()

    def listen(stream):
        for line in stream:
            said.append(line)
            if word in line:
                heard.set()

    readers = [threading.Thread(target=listen, args=(stream,), daemon=True) for stream in (job.stdout, job.stderr)]
    for reader in readers:
        reader.start()
    return said, heard, readers


@pytest.mark.parametrize(
    ("start", "code", "named"),
    [
        (gloo, 1, r"error: The link to host2 \(rank 1\) is broken: no packet has come from there for \d+ s"),
        (mpirun, 205, r"lost communication with a remote daemon.*on node host2"),
    ],
    ids=["horovodrun", "mpirun"],
)
def test_a_cut_link_ends_the_job_and_names_the_host(three, start, code, named):
    job = three.start(1, start("host1:1,host2:1", *TRAIN, "--epochs", "9999", "--run-dir", "cut"), **PROBES)
    said, training, readers = listened_to(job, "epoch ")
    assert training.wait(120), "".join(said)
    three.cut(2)
    cut = time.monotonic()
    try:
        assert job.wait(60) == code, "".join(said)
        taken = time.monotonic() - cut
        for reader in readers:
            reader.join(10)
        assert re.search(named, "".join(said), re.DOTALL), "".join(said)
        assert taken < 30
        while left := [line for host in (1, 2) for line in three.processes(host) if "hvdtrain" in line]:
            assert time.monotonic() - cut < 30, left
            time.sleep(0.5)
    finally:
        three.heal(2)
        clear(three)


# --- a worker that is killed ---


def test_an_asynchronous_job_goes_on_without_a_lost_host(three):
    """Rank 1 is alone on its host, so that rank 0 gets no sign of life any more. Open MPI's mpirun stays."""
    for number in (1, 2):
        shutil.copy(APART, three.disk(number) / APART.name)
    given = {"options": {"update": "async"}, "elastic": True, "hosts": True, "lost": {"1": 70}}
    program, *words = mpirun("host1:1,host2:1", "python", APART.name, json.dumps(given))
    job = three.start(1, [program, "--enable-recovery", *words], **PROBES)
    said, ended, _ = listened_to(job, "ENDED")
    try:
        assert ended.wait(200), "".join(said)
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        for number in (1, 2):
            three.kill(number)
    text = "".join(said)
    assert "rank 1 (host2) is lost" in text, text
    assert "elastic: 2 ranks before, 1 now: goes on after step 50\n" in text, text
    end = json.loads(re.search(r"ENDED (\{.*\})", text)[1])
    assert (end["rank"], end["size"], end["steps"]) == (0, 1, 200)
    assert end["val_loss"][-1] < 0.2
