"""Choose whether sums take two levels: as the user wants it, or as a measurement at the start says."""

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING

from hvdtrain.config.options import check
from hvdtrain.config.runtime import ElasticConfig, HierarchyName, RuntimeConfig
from hvdtrain.runtime.control.channel import ControlChannel, gather
from hvdtrain.runtime.launchers import Environment
from hvdtrain.runtime.world import World

if TYPE_CHECKING:
    from hvdtrain.runtime.collectives import AxisCollectives

HOROVOD_VARIABLE = "HOROVOD_HIERARCHICAL_ALLREDUCE"
"""Set by `horovodrun --hierarchical-allreduce`; Horovod itself acts on it with NCCL alone."""
PROBE_ELEMENTS = 2 * 1024 * 1024
REPETITIONS = 3
WORTH_IT = 0.95
"""Share of the time of a sum over all ranks at once below which two levels are taken: less is noise."""


def resolve_hierarchy(config: RuntimeConfig, environment: Environment, environ: Mapping[str, str]) -> HierarchyName:
    """Return how sums are to travel, before anything is measured.

    Raises:
        ConfigError: two levels in an elastic job.
    """
    choice = config.hierarchical_allreduce
    if choice == "auto" and HOROVOD_VARIABLE in environ:
        choice = "always" if environ[HOROVOD_VARIABLE].strip() not in ("", "0") else "never"
    if environment.elastic:
        check(config, ElasticConfig(elastic=True))
        return "never"
    # What is measured may come out otherwise in the next run.
    return "never" if choice == "auto" and config.deterministic else choice


def choose_hierarchy(world: World, choice: HierarchyName, control: ControlChannel, timeout: float) -> World:
    """Return `world` with the collectives that its sums are to use, and a remark where there was a choice. Collective.

    All come to the same result: each knows the times of all.

    Args:
        world: opened with process sets for two levels, unless `choice` is never.
        choice: see `resolve_hierarchy`.
    """
    collectives = world.collectives.get("dp")
    if collectives is None or choice == "never" or (choice == "auto" and collectives.by_host is None):
        return world
    hosts = len(set(world.hosts))
    ratio, flat = 1.0, collectives
    if collectives.by_host is None:
        remark = (
            "--hierarchical-allreduce=always has no effect: it needs several hosts, and several ranks on one of "
            f"them. Received: {world.size} {'ranks' if world.size > 1 else 'rank'} on {hosts} "
            f"{'hosts' if hosts > 1 else 'host'}."
        )
    else:
        reason = "as --hierarchical-allreduce=always wants it."
        if choice == "auto":
            ratio, flat = _time_by_host(collectives, control, timeout)
            reason = f"{ratio:.2f} of the time of one ring."
        remark = f"gradients are summed inside each host first, then between the {hosts} hosts: {reason}"
        if choice == "auto" and ratio >= WORTH_IT:
            collectives = flat
            remark = (
                "gradients are summed over all ranks at once: inside each host first, then between the hosts, took "
                f"{ratio:.2f} times as long (--hierarchical-allreduce)."
            )
    return replace(
        world, collectives={**world.collectives, "dp": collectives}, remarks=(*world.remarks, f"note: {remark}")
    )


def _time_by_host(
    collectives: "AxisCollectives", control: ControlChannel, timeout: float
) -> "tuple[float, AxisCollectives]":
    """Return the time of a sum in two levels as a share of a flat one, and the flat collectives."""
    import tensorflow as tf

    from hvdtrain.runtime.collectives import AxisCollectives

    def probe(collectives: AxisCollectives, name: str) -> Callable[[], float]:
        values = tf.Variable(tf.zeros([PROBE_ELEMENTS]))
        summed = tf.function(
            lambda: collectives.all_reduce(values.read_value(), name=f"hierarchy_probe/{name}")[:1], autograph=False
        )

        def seconds() -> float:
            begin = time.perf_counter()
            summed().numpy()
            return time.perf_counter() - begin

        seconds()  # the first call compiles
        return seconds

    flat = AxisCollectives(replace(collectives.group, by_host=None))
    probes = [probe(flat, "flat"), probe(collectives, "by_host")]
    rounds = [[seconds() for seconds in probes] for _ in range(REPETITIONS)]
    mine = [median(times) for times in zip(*rounds, strict=True)]
    everyone = gather(control, mine, timeout=timeout)
    slowest_flat, slowest_by_host = (max(times) for times in zip(*everyone, strict=True))
    return float(slowest_by_host / slowest_flat), flat
