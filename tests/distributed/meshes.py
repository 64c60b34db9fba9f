"""Several layouts of the ranks of one launch: a launch costs seconds, a process set next to nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from world import World

from hvdtrain.backends.horovod import HorovodBackend
from hvdtrain.config.parallel import parse_axes
from hvdtrain.runtime.mesh import Mesh, process_sets_of
from hvdtrain.runtime.session import current, set_current
from hvdtrain.runtime.world import group_collectives

_SETS = {}
"""Those that there are by now, by their ranks: Horovod refuses a process set twice."""


def remove_process_sets() -> None:
    """Remove those that a failed check has left, on all ranks: other checks add the same. Collective."""
    import horovod.tensorflow as hvd

    while _SETS:
        assert hvd.remove_process_set(_SETS.popitem()[1])


@contextmanager
def alone() -> Iterator[None]:
    """Make layers within this context as a process by itself does, without a job."""
    before = current()
    set_current(None)
    try:
        yield
    finally:
        set_current(before)


@contextmanager
def on_mesh(world: World, axes: str) -> Iterator[World]:
    """Lay out the ranks as `hvdtrain.init(parallel=axes)` would, within this context."""
    import horovod.tensorflow as hvd

    before = world.session
    mesh = Mesh.of(parse_axes(axes), before.world.rank, before.world.size)
    added = [ranks for ranks in process_sets_of(mesh) if ranks not in _SETS]
    for ranks in added:
        _SETS[ranks] = hvd.add_process_set(list(ranks))
    everyone = {tuple(range(before.world.size)): hvd.global_process_set}
    laid_out = replace(before.world, mesh=mesh, collectives=group_collectives(mesh, {**everyone, **_SETS}, {}))
    session = replace(before, world=laid_out, config=replace(before.config, parallel=axes))
    set_current(session)
    failure = b"failed"
    try:
        yield replace(world, session=session, backend=HorovodBackend(session))
        failure = b""
    finally:
        set_current(before)
        # Other checks add the same. Removing waits for all ranks, of which one that has failed may be elsewhere.
        if added and not any(world.gather(failure)):
            for ranks in added:
                assert hvd.remove_process_set(_SETS.pop(ranks))
