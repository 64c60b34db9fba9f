"""`train` and `recipes`: train a recipe or resume a run, show the layout of its ranks, list the recipes."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.cli.parser import Parser, group_help, overview, parse_options, sections_of
from hvdtrain.cli.running import import_tensorflow_for_cpu, run_here, run_on_all_ranks
from hvdtrain.config.errors import ConfigError, opt
from hvdtrain.config.files import FilesRead, apply_values, digest, read_values
from hvdtrain.config.options import declaration_of
from hvdtrain.config.parallel import DATA_AXES, parse_axes
from hvdtrain.config.run import Config, without_foreign_arguments
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.config.tuning import TuningConfig
from hvdtrain.recipes import DEFAULT, RECIPES, describe, recipe, run_name
from hvdtrain.runs.folder import RunFolder, check_located, given_here, located, start_folder
from hvdtrain.runtime.control.agreement import on_first
from hvdtrain.runtime.mesh import Mesh, process_sets_of
from hvdtrain.runtime.session import Session

if TYPE_CHECKING:
    from hvdtrain.training.elastic import Commits

FREE_ON_RESUME = ("checkpoint", "elastic", "observability", "pipeline", "runtime", "update")
"""Sections that may change on resume; of others only the options below and the location of the data."""
FREE_OPTIONS = {
    "training": ("epochs", "max_steps", "accumulate", "jit", "recompute"),
    "data": ("on_bad_record", "cache", "data_threads", "data_memory_mb"),
    "model": ("embedding_sharding", "sequence_parallel"),
    "tuning": ("teacher",),
}
"""By section: the length of the run, how samples are read, and what each rank holds and computes at a time."""
RUNS_BEFORE = ("weights", "teacher")
"""Options that name the folder of another run."""
PLACES = ("path", "validation_path")
"""Arguments for the location of samples, which are compared with those that the run began with."""
AUTO = Path("auto")
"""The value of --resume that continues the run in --run-dir, if there is one. A folder of that name has others."""


@dataclass(frozen=True)
class Files:
    """Options of a command line besides the configuration: mostly paths."""

    config: Path | None = None
    """YAML file with options; those on the command line override it."""
    run_dir: Path | None = None
    """Folder of the run, new or empty; runs/RECIPE-DATE-TIME by default."""
    resume: Path | None = None
    """Go on with the run in this folder, from its newest good checkpoint. `auto`: that in --run-dir, or start it."""
    dry_run: int | None = None
    """Show how so many ranks would be laid out, refuse what a start on them would, and start none."""

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to resume; None where only rank 0 will see whether there is one."""
        return None if self.resume == AUTO else self.resume


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    files: Files
    start: Path | None = None
    """Folder in which relative paths of the configuration begin; None: the working folder."""


def main(argv: list[str]) -> int:
    """Train or resume a run and return the exit code."""
    if {"-h", "--help"} & set(argv):
        return run_here(lambda: argv, _help)
    if any(word.partition("=")[0] == "--dry-run" for word in argv):
        return run_here(lambda: parse(argv), lambda request: show_layout(request.config, request.files.dry_run or 0))

    @cache
    def commits() -> "Commits":
        from hvdtrain.training.elastic import Commits

        return Commits()

    return run_on_all_ranks(
        lambda read: parse(argv, read),
        _describe,
        partial(_train, commits),
        elastic=lambda request: request.config.elastic.elastic,
        trace=lambda request: request.config.observability.trace,
    )


# -- the command line --


def parse(argv: list[str], read: FilesRead | None = None) -> Request:
    """Parse `[RECIPE] [--option value …]`: flags override the file, which overrides the recipe.

    Raises:
        UserError: an unknown recipe or option, a wrong type, or an invalid file.
    """
    name, flags = _recipe_name(argv)
    given = parse_options(flags, "train", {"files": Files, "": Config, **sections_of(Config(""))})
    named = given.pop("").get("recipe")
    given["tuning"] |= {name: _absolute(given["tuning"][name]) for name in RUNS_BEFORE if given["tuning"].get(name)}
    files, read = Files(**given.pop("files")), read or FilesRead()
    start = _start(files, read)
    base = located(_base(name, files, read), start)
    if named not in (None, base.recipe):
        raise ConfigError(f"The recipe is the first word: python -m hvdtrain {named}.")
    given["tuning"] = _with_owners(base.tuning, given["tuning"])
    config = _override(without_foreign_arguments(base, _override(base, given)), given)
    resumed = files.resumed
    if resumed is not None:
        if "weights" in given["tuning"]:
            raise ConfigError("--resume RUN begins with the weights of RUN: it takes no --weights.")
        # Only the location is given on resume; the other arguments stay.
        merged = {**base.data.data_args, **config.data.data_args}
        config = replace(config, data=replace(config.data, data_args=merged))
        if _begins_anew(base.tuning, config.tuning):
            tuning = replace(config.tuning, weights=_absolute(resumed))
            most = given["training"].get("max_steps")  # not where the one before ended
            training = replace(config.training, max_steps=most)
            files, config = replace(files, resume=None), replace(config, tuning=tuning, training=training)
        elif files.run_dir is not None:
            raise ConfigError("--resume goes on with a run as it was, in its folder: it takes no --run-dir.")
        else:
            _check_resume(base, config, resumed)
    if start is not None:
        config = check_located(given_here(base, config), start)
    return Request(config, files, start)


def _recipe_name(argv: list[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return None, argv


def _override(config: Config, given: Mapping[str, Mapping[str, Any]]) -> Config:
    """Return `config` with the given options of each section."""
    return replace(config, **{name: replace(getattr(config, name), **part) for name, part in given.items() if part})


def _start(files: Files, read: FilesRead) -> Path | None:
    """Return the folder in which the run was started whose configuration is taken over."""
    if files.resumed is not None:
        return start_folder(RunFolder(files.resumed), read)
    return None if files.config is None else start_folder(RunFolder(files.config.parent), read)


def _base(name: str | None, files: Files, read: FilesRead) -> Config:
    """Return the configuration that flags override."""
    if files.resume == AUTO and files.run_dir is None:
        raise ConfigError("--resume auto needs --run-dir: the folder of the run to go on with, or to start.")
    if files.resumed is not None:
        if name is not None or files.config is not None:
            raise ConfigError("--resume goes on with a run as it was: it takes no recipe and no --config.")
        from hvdtrain.runs.folder import opened

        return opened(files.resumed, "--resume", read)[1]
    if files.config is None:
        return recipe(name or DEFAULT)
    values = read_values(files.config, read)
    declared = values.get("recipe", name or DEFAULT)
    if name is not None and declared != name:
        raise ConfigError(f"--config {files.config} is of the recipe {declared!r}, not of {name!r}.")
    base, origin = recipe(str(declared)), f"--config {files.config}"
    return apply_values(without_foreign_arguments(base, apply_values(base, values, origin)), values, origin)


def _begins_anew(before: TuningConfig, chosen: TuningConfig) -> bool:
    """Return whether a run with these options begins with the weights of the one before, in a folder of its own."""
    kept = {name: value for name, value in vars(before).items() if name != "teacher"}  # it may have been moved
    return any(getattr(chosen, name) != value for name, value in kept.items()) or (
        (before.teacher is None) != (chosen.teacher is None)
    )


def _with_owners(before: TuningConfig, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, and the defaults of those whose owner is unset by them."""
    after, alone = {**vars(before), **given}, {}
    for each in fields(TuningConfig):
        rules = [rule for rule in declaration_of(each).rules if rule.kind == "applies_to"]
        if any(not any(after[owner.name] for owner in rule.others) for rule in rules):
            alone[each.name] = each.default
    return {**alone, **given}


def _absolute(place: str | Path) -> str:
    return str(Path(place).expanduser().absolute())


def _check_resume(base: Config, config: Config, run: Path) -> None:
    kept = {name: getattr(config, name) for name in FREE_ON_RESUME}
    kept |= {name: _with_free(name, getattr(base, name), getattr(config, name)) for name in FREE_OPTIONS}
    may = replace(base, **kept)
    if may != config:
        asked, before = (
            {field: value for part in sections_of(each).values() for field, value in vars(part).items()}
            for each in (config, may)
        )
        other = [name for name in asked if asked[name] != before[name]]
        changed = ", ".join(f"{opt(name, asked[name])} (it was {before[name]})" for name in other)
        flags = ", ".join(f"--{name.replace('_', '-')}" for names in FREE_OPTIONS.values() for name in names)
        raise ConfigError(
            f"--resume {run} goes on with the run as it was. Received: {changed}. Only {flags}, where its data are "
            f"(--data-args path) and the options of {', '.join(FREE_ON_RESUME)} may change."
        )


def _with_free(section: str, kept: Any, chosen: Any) -> Any:
    """Return the options `kept` of a section, with those of `chosen` that may change, and its location of the data."""
    options = {name: getattr(chosen, name) for name in FREE_OPTIONS[section]}
    if section == "data":
        places = {name: value for name, value in chosen.data_args.items() if name in PLACES}
        options["data_args"] = {**kept.data_args, **places}
    return replace(kept, **options)


# -- the run --


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    files = {name: str(value) for name, value in vars(request.files).items() if value is not None}
    files.pop("config", None)
    return request.config.processes, {"the configuration": digest(request.config), **files}


def _train(commits_of_process: "Callable[[], Commits]", session: Session, request: Request) -> None:
    from hvdtrain.runs.run import train

    timeout = request.config.runtime.start_timeout
    commits = commits_of_process() if request.config.elastic.elastic else None
    if commits is not None and session.link.worlds is not None:
        session.link.worlds.training = True
    chosen = None if commits is None else commits.agree("train", session)
    if chosen is None:
        chosen = json.loads(on_first(session.control, lambda: json.dumps(_folder(request)).encode(), timeout=timeout))
    if commits is not None:
        commits.settled = chosen
    path, resume = chosen
    train(session, request.config, Path(path), resume=resume, start=request.start, commits=commits)


def _folder(request: Request) -> tuple[str, str]:
    """Return the run's folder, and whether to resume the run in it (a `runs.resume.Resume`)."""
    from hvdtrain.runs.folder import default_path, opened, refuse_occupied

    files = request.files
    if files.resumed is not None:
        return str(files.resumed), "yes"
    path = files.run_dir or default_path(run_name(request.config))
    if files.resume == AUTO and RunFolder(path).config.is_file():
        _check_resume(opened(path, "--resume auto")[1], request.config, path)
        return str(path), "auto"
    refuse_occupied(path)
    return str(path), "no"


# -- help and recipes --


def _help(argv: list[str]) -> int:
    """Print the options, or those of the group after --help, with the recipe's values."""
    name, flags = _recipe_name(argv)
    config = recipe(name or DEFAULT)
    place = next(place for place, word in enumerate(flags) if word in ("-h", "--help"))
    group = "".join(flags[place + 1 : place + 2])
    print(group_help(config, group) if group and group[0] != "-" else overview(config, Files, name))
    return 0


def list_recipes(argv: list[str]) -> int:
    """Print every recipe with its description."""

    def show(_: Any) -> int:
        width = max(map(len, RECIPES))
        print("\n".join(f"{name:<{width}}  {describe(name)}" for name in RECIPES))
        return 0

    return run_here(lambda: Parser("recipes", "List the recipes.").parse_args(argv), show)


# -- the layout of ranks (--dry-run) --

MOST_GROUPS = 8
"""Number of groups of an axis that are shown."""
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
    from hvdtrain.runs.trainers import check_start

    check_start(config, ranks)
    print("\n".join(lines))
    return 0


def layout(config: Config, ranks: int) -> list[str]:
    """Return the lines that describe the layout of `ranks` ranks.

    Raises:
        ConfigError: the axes of the mesh do not divide them.
    """
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
