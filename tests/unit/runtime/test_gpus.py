"""Which GPU each rank takes, and jobs whose GPUs do not go round."""

import json
import subprocess
import types

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.gpus import RankGpus, agree_on_gpu, choose_gpus, driver_names, visible_gpus
from hvdtrain.runtime.launchers import detect_environment


def ranks(*visible, host="a"):
    return [RankGpus(host, tuple(names)) for names in visible]


def test_ranks_that_see_all_gpus_take_them_by_local_rank():
    assert choose_gpus(ranks("ABCD", "ABCD", "ABCD")) == ["A", "B", "C"]


def test_a_scheduler_that_shows_each_rank_its_own_is_followed():
    assert choose_gpus(ranks("A", "B", "C", "D")) == ["A", "B", "C", "D"]


def test_hosts_have_gpus_of_their_own():
    assert choose_gpus([*ranks("AB", "AB"), *ranks("AB", "AB", host="b")]) == ["A", "B", "A", "B"]


def test_a_rank_that_sees_fewer_comes_first():
    assert choose_gpus(ranks("AB", "A")) == ["B", "A"]


def test_a_rank_of_an_earlier_world_keeps_its_gpu():
    """Rank 0 of the first world, with GPU A, was lost; the survivor has B, and the new rank takes A."""
    assert choose_gpus([RankGpus("a", ("A", "B"), taken="B"), RankGpus("a", ("A", "B"))]) == ["B", "A"]


def test_no_gpu_anywhere():
    assert choose_gpus(ranks("", "")) == [None, None]


@pytest.mark.parametrize("visible", [("AB", "AB", "AB"), ("A", "A", "A"), ("A", "B", "B")])
def test_fewer_gpus_than_ranks_are_refused(visible):
    with pytest.raises(LaunchError, match=r"Each rank takes a GPU.*Received: 3 ranks on a, which see [12] of its GPUs"):
        choose_gpus(ranks(*visible))


def test_some_ranks_without_a_gpu_are_refused():
    with pytest.raises(LaunchError, match=r"Received: ranks 1-2 on b without a GPU"):
        choose_gpus([*ranks("A"), *ranks("", "", host="b")])
    assert choose_gpus([*ranks("A"), *ranks("", host="b")], mixed=True) == ["A", None]


class Job:
    """A channel on which another rank of this host has spoken."""

    def __init__(self, visible):
        self.other = json.dumps({"host": "a", "visible": visible, "taken": None}).encode()

    def exchange(self, payload, *, timeout):
        return [self.other, payload]


@pytest.fixture
def second(monkeypatch):
    """This process is rank 1 of 2 on host a, whose TensorFlow lists two GPUs and whose driver names none."""
    import tensorflow as tf

    from tests.unit.launcher_environments import OPEN_MPI_4

    gpus = [types.SimpleNamespace(name=f"GPU:{number}") for number in range(2)]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: gpus)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus)
    monkeypatch.setattr("hvdtrain.runtime.gpus.driver_names", lambda: ())
    monkeypatch.setattr("socket.gethostname", lambda: "a")
    return detect_environment(OPEN_MPI_4)


def test_all_ranks_agree_on_the_index_of_each(second, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert agree_on_gpu(Job(["#0", "#1"]), second, visible_gpus("a"), timeout=1) == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert agree_on_gpu(Job(["0,1#0", "0,1#1"]), second, visible_gpus("a"), timeout=1) == 0


def test_a_machine_without_a_driver_names_no_gpu():
    assert driver_names("libhvdtrain-no-such-driver.so") == ()


DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = 7 + index; return 0; }
int cuDeviceGetUuid(unsigned char *name, int device) { memset(name, device, 16); return 0; }
"""


def test_the_driver_names_gpus_by_their_uuids(tmp_path):
    source, library = tmp_path / "cuda.c", tmp_path / "libcuda.so"
    source.write_text(DRIVER)
    subprocess.run(["g++", "-x", "c", "-shared", "-fPIC", "-o", library, source], check=True)
    assert driver_names(str(library)) == ("07" * 16, "08" * 16)
