"""All checks, in the order in which what they look at builds on one another."""

from collections.abc import Callable, Iterator

from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.diagnosis import exchange, gpus, host, software
from hvdtrain.runtime.diagnosis.check import Check
from hvdtrain.runtime.diagnosis.machine import read_machine
from hvdtrain.runtime.diagnosis.probe import Finding, probe
from hvdtrain.runtime.malloc import choose_malloc, faults_of_reuse


def diagnose(announce: Callable[[str], None] = lambda what: None) -> Iterator[Check]:
    """Try each part and yield what was found, as soon as it is known.

    Args:
        announce: told what is tried next, where that takes seconds.
    """
    yield software.check_python()
    announce("importing TensorFlow and Horovod")
    found = probe()
    yield software.check_tensorflow(found["tensorflow"])
    yield software.check_keras(found["keras"])
    yield software.check_horovod(found["horovod"], found["tensorflow"])
    if "version" in found["horovod"]:
        yield from _check_exchange(found, announce)
    yield from _check_host()
    announce("looking for GPUs")
    yield from gpus.check_gpus(found["tensorflow"], found["horovod"])
    yield host.check_key()


def _check_exchange(found: dict[str, Finding], announce: Callable[[str], None]) -> Iterator[Check]:
    """Check what only a usable Horovod can do."""
    horovod = found["horovod"]
    yield software.check_controllers(horovod)
    mpi = software.check_mpi(horovod, found["mpi4py"])
    yield mpi
    announce("initializing Horovod in one process")
    yield exchange.check_horovod_alone()
    if horovod["mpi"] and mpi.status == "ok":
        announce("initializing MPI in one process")
        yield exchange.check_mpi_alone()
    if horovod["gloo"]:
        announce("reducing over 2 ranks with Gloo")
        yield exchange.check_gloo()
    if horovod["mpi"] and mpi.status == "ok":
        announce("reducing over 2 ranks with MPI")
        yield exchange.check_mpi()


def _check_host() -> Iterator[Check]:
    machine = read_machine()
    yield host.check_cores(machine)
    yield host.check_memory(machine)
    malloc = choose_malloc(RuntimeConfig.malloc)  # for the rest of this process, as in training
    yield host.check_malloc(malloc, faults_of_reuse(host.REUSED_MIB))
    yield host.check_shm(machine)
