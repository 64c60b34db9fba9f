"""`data pack` as it is typed: to the end, killed midway, and over damage."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.awake import awake_seconds
from tests.launching import hvdtrain, job_environment

pytestmark = pytest.mark.extended

IMAGES = "cifar10-train.tar.gz"


@pytest.fixture
def folder(tmp_path):
    """Class folders of 40 images, and where the commands are typed."""
    import numpy as np
    from PIL import Image

    for number in range(40):
        file = tmp_path / "images" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)
    return tmp_path


def typed(folder, *words, timeout=100):
    return hvdtrain("none", 1, "data", *words, cwd=folder, timeout=timeout, HVDTRAIN_CACHE=str(folder / "cache"))


def done(folder, *words):
    job = typed(folder, *words)
    assert job.code == 0, job.text[-4000:]
    assert job.err == ""
    return job.out


def flip_byte(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


def test_packed_images_are_trained_on(folder):
    said = done(folder, "pack", "images", "packed", "--shards", "2", "--validation", "8", "--workers", "2")
    assert "packed holds 40 images of 2 classes (32 for train, 8 for validation) in 3 files" in said
    assert said.splitlines()[-1] == "Train on it with --data tfrecord --data-args path packed"
    words = ("--data", "tfrecord", "--data-args", "path", "packed", "--shard-by", "files", "--batch", "8")
    job = hvdtrain("mpirun", 2, *words, "--epochs", "1", "--run-dir", "run", cwd=folder)
    assert job.code == 0, job.text[-4000:]
    assert json.loads((folder / "run/summary.json").read_text())["steps"] == 4


def test_damage_is_named_and_mended_by_packing_again(folder):
    words = ("pack", "images", "packed", "--shards", "4", "--workers", "2")
    done(folder, *words)
    shards = sorted((folder / "packed").glob("*.tfrecord"))
    whole = [shard.read_bytes() for shard in shards]
    flip_byte(shards[1], 150)  # in the first record, behind its length
    shards[2].write_bytes(whole[2][:-100])
    train = ("--data", "tfrecord", "--data-args", "path", "packed", "--batch", "8", "--max-steps", "2")
    failed = hvdtrain("none", 1, *train, cwd=folder, HVDTRAIN_CACHE=str(folder / "cache"))
    assert failed.code == 2, failed.text[-4000:]
    assert f"{shards[2].name} has {len(whole[2]) - 100} bytes instead of {len(whole[2])}" in failed.err
    done(folder, *words)
    assert [shard.read_bytes() for shard in shards] == whole


# Killed midway


def start(folder, source, *words):
    """Begin to pack in a process group of its own."""
    command = [sys.executable, "-m", "hvdtrain", "data", "pack", source, "packed", *words]
    environ = job_environment(HVDTRAIN_CACHE=str(folder / "cache"))
    return subprocess.Popen(
        command,
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # Tests that run in the background of a shell ignore Ctrl-C, and so would what they start.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def wait_for(condition, process, timeout=100):
    limit = awake_seconds() + timeout
    while not condition():
        assert process.poll() is None, "packing ended before it could be stopped"
        assert awake_seconds() < limit, "nothing was packed"
        time.sleep(0.001)


def group_is_gone(process, timeout=60):
    """Whether no process of the group is left, at last."""
    limit = awake_seconds() + timeout
    while awake_seconds() < limit:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def many(folder):
    """Images that take some time to pack: 3000 files of 40 kB, which only inspection would decode."""
    source = folder / "many"
    for number in range(3000):
        file = source / f"class-{number % 3}" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(number.to_bytes(8, "little") * 5000)
    return folder


def stop_midway(many, words, number):
    """Pack, stop it by the signal `number` once 5 shards are there, and return the files that are."""
    packed = many / "packed"
    process = start(many, "many", *words)
    wait_for(lambda: len(list(packed.glob("*.tfrecord"))) >= 5, process)
    # Ctrl-C reaches all processes of the group; the others only the one that was typed.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    process.communicate(timeout=200)
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    assert group_is_gone(process), "workers were left behind"
    kept = whole_files(packed)
    assert 5 <= len(kept) < 60
    return kept


def whole_files(packed):
    """The shards that are there, and what would tell that one was made anew."""
    return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in packed.glob("*.tfrecord")}


def test_what_was_killed_midway_is_refused_until_it_is_taken_up_again(many):
    words = ("--shards", "60", "--workers", "2")
    kept = stop_midway(many, words, signal.SIGKILL)
    train = ("--data", "tfrecord", "--data-args", "path", "packed", "--max-steps", "1")
    job = hvdtrain("none", 1, *train, cwd=many, HVDTRAIN_CACHE=str(many / "cache"))
    assert job.code == 2, job.text[-4000:]
    assert "packing was not finished: run data pack again" in job.err
    done(many, "pack", "many", "packed", *words)
    now = whole_files(many / "packed")
    assert len(now) == 60
    assert {name: now[name] for name in kept} == kept
    done(many, "pack", "many", "straight", *words)
    for file in (many / "straight").glob("*.tfrecord"):
        assert (many / "packed" / file.name).read_bytes() == file.read_bytes()
    assert not (many / "packed" / ".packing").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_packing_that_is_stopped_leaves_no_process_behind(many, number):
    stop_midway(many, ("--shards", "60", "--workers", "2"), number)


@pytest.mark.data
def test_real_images_go_through_unchanged(folder):
    data = os.environ.get("HVDTRAIN_DATA")
    if not data or not (Path(data) / IMAGES).is_file():
        pytest.skip(f"the folder HVDTRAIN_DATA holds no {IMAGES}")
    said = done(folder, "pack", IMAGES, "packed", "--shards", "8", "--validation", "5000")
    assert "50,000 images of 10 classes (45,000 for train, 5,000 for validation) in 9 files" in said
