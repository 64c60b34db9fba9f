"""`train --dry-run N`: how N ranks would be laid out, and what a start on them would refuse, without starting one."""

from hvdtrain.cli.local import import_tensorflow_for_cpu
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.parallel import DATA_AXES, parse_axes
from hvdtrain.config.run import Config
from hvdtrain.runtime.mesh import Mesh, process_sets_of

MOST_GROUPS = 8
"""Of one axis that are shown."""
MEANING = {
    "pp": "hold different layers",
    "dp": "are replicas, given different samples",
    "cp": "compute different positions of the same samples",
    "ep": "hold different experts or tables, given different samples",
    "tp": "hold slices of each matrix",
}


def show_layout(config: Config, ranks: int) -> int:
    """Print the layout of `ranks` ranks, and return the exit code.

    Raises:
        ConfigError: not a number of ranks.
        UserError: what a start on so many ranks would refuse; see `check_start`.
    """
    if ranks < 1:
        raise ConfigError(f"--dry-run takes a number of ranks. Received: {ranks}.")
    lines = layout(config, ranks)
    from hvdtrain.runs.dry_start import check_start

    check_start(config, ranks)
    print("\n".join(lines))
    return 0


def layout(config: Config, ranks: int) -> list[str]:
    """Return the lines that describe the layout; see `show_layout`."""
    mesh = Mesh.of(parse_axes(config.processes.parallel), 0, ranks)
    axes = mesh.named(mesh.axis_names) or ("dp",)
    shape = " x ".join(f"{axis} {mesh.size(axis)}" for axis in axes)
    return [
        f"ranks        {ranks} on a mesh of {shape}",
        *(f"{axis:<12} {_groups(mesh, axis)}" for axis in axes),
        f"batch        {_batch(config.data.batch, mesh)}",
        f"process sets {len(process_sets_of(mesh))} besides that of all ranks",
    ]


def _groups(mesh: Mesh, axis: str) -> str:
    groups = mesh.groups(axis)
    shown = [_shown(group) for group in groups[:MOST_GROUPS]]
    more = f" … and {len(groups) - MOST_GROUPS} more" if len(groups) > MOST_GROUPS else ""
    return f"{mesh.size(axis)} ranks that {MEANING[axis]}: {', '.join(shown)}{more}"


def _shown(group: tuple[int, ...]) -> str:
    """Return ranks as `0-3` where they follow one another, else as `0+2+4+6`, or `0+8+…+56` where they are many."""
    if group == tuple(range(group[0], group[-1] + 1)):
        return f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0])
    if len(group) > 4:
        return f"{group[0]}+{group[1]}+…+{group[-1]}"
    return "+".join(map(str, group))


def _batch(batch: int, mesh: Mesh) -> str:
    import_tensorflow_for_cpu()
    from hvdtrain.data.batch import per_replica

    samples = per_replica(batch, mesh.size(*DATA_AXES))
    shared = ", ".join(axis for axis in mesh.named(mesh.axis_names) if axis not in DATA_AXES)
    return f"{batch} samples, {samples} on each rank" + (f"; ranks along {shared} have the same" if shared else "")
