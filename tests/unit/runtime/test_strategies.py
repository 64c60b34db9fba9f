"""Which backends can be chosen where; what they compute is in tests/distributed."""

from dataclasses import replace

import pytest

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.config.runtime import IN_ONE_PROCESS, OF_TF_DISTRIBUTE, RuntimeConfig
from hvdtrain.runtime.control.open import LocalChannel
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import wants_horovod
from hvdtrain.runtime.strategies import open_strategy

ALONE = detect_environment({})


def opened(backend, **options):
    return open_strategy(RuntimeConfig(backend=backend, **options), ALONE, LocalChannel(), timeout=1)


@pytest.mark.parametrize("backend", IN_ONE_PROCESS)
def test_backends_of_one_process_refuse_more_of_them(backend):
    two = replace(ALONE, launcher="mpirun", size=2)
    with pytest.raises(LaunchError, match=f"backend='{backend}' trains in one process, but mpirun started 2"):
        wants_horovod(RuntimeConfig(backend=backend), two)
    assert not wants_horovod(RuntimeConfig(backend=backend), ALONE)


@pytest.mark.parametrize("backend", ["horovod", "single", "one_device", "multi_worker_mirrored", "tpu", "auto"])
def test_replicas_are_for_backends_that_have_them_in_one_process(backend):
    with pytest.raises(ConfigError, match=f"replicas is for .*backend='{backend}' does not take it"):
        RuntimeConfig(backend=backend, replicas=2)


@pytest.mark.parametrize("backend", ["horovod", "mirrored", "auto"])
def test_what_workers_send_over_is_for_workers(backend):
    with pytest.raises(ConfigError, match=f"communication is for .*backend='{backend}' does not take it"):
        RuntimeConfig(backend=backend, communication="ring")


def test_no_replicas_are_none():
    with pytest.raises(ConfigError, match=r"replicas must be at least 1\. Received: 0"):
        RuntimeConfig(backend="mirrored", replicas=0)


def test_a_tpu_that_is_not_there_is_said_not_to_be(monkeypatch):
    monkeypatch.delenv("TPU_NAME", raising=False)
    with pytest.raises(LaunchError, match="There is no TPU"):
        opened("tpu")


def test_a_tpu_that_cannot_be_reached_is_named(monkeypatch):
    import tensorflow as tf

    def refuse(tpu):
        raise ValueError(f"no {tpu}")

    monkeypatch.setenv("TPU_NAME", "far")
    monkeypatch.setattr(tf.distribute.cluster_resolver, "TPUClusterResolver", refuse)
    with pytest.raises(LaunchError, match="The TPU 'far' cannot be used: no far"):
        opened("tpu")


def test_nccl_without_gpus_is_refused():
    with pytest.raises(LaunchError, match="communication='nccl' needs GPUs"):
        opened("multi_worker_mirrored", communication="nccl")


def test_workers_that_come_too_late_are_told_so(monkeypatch):
    import tensorflow as tf

    tf.constant(1.0)
    monkeypatch.setenv("TF_CONFIG", "")
    with pytest.raises(LaunchError, match=r"must be chosen before TensorFlow does any work.*call hvdtrain.init\(\)"):
        opened("multi_worker_mirrored")


def test_one_device_is_one_replica():
    assert opened("one_device").strategy.num_replicas_in_sync == 1


def test_every_strategy_can_be_named():
    assert {RuntimeConfig(backend=name).backend for name in OF_TF_DISTRIBUTE} == set(OF_TF_DISTRIBUTE)
