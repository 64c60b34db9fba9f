"""`train`: train a recipe, or resume a run."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from hvdtrain.cli.dry_run import show_layout
from hvdtrain.cli.launch import parse_errors_as_user_errors, run_on_all_ranks
from hvdtrain.cli.local import run_here
from hvdtrain.cli.options import Option, options_of, refuse_unknown, sections_of
from hvdtrain.cli.train_help import group_help, overview, wrapped
from hvdtrain.config.errors import ConfigError, UserError, on_command_line
from hvdtrain.config.files import FilesRead, apply_values, digest, read_values
from hvdtrain.config.observability import TraceConfig, trace_config
from hvdtrain.config.run import NAMED_WITH_ARGUMENTS, Config, with_arguments_of, without_foreign_arguments
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.recipes.registry import DEFAULT, recipe
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.places import check_located, given_here, located, start_folder
from hvdtrain.runtime.control.agreement import on_first
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session

if TYPE_CHECKING:
    from hvdtrain.training.elastic import Commits

FREE_ON_RESUME = ("checkpoint", "elastic", "observability", "pipeline", "runtime")
"""Sections that may change on resume; of others only the options below and the location of the data."""
FREE_OPTIONS = {
    "training": ("epochs", "max_steps", "accumulate", "jit", "recompute"),
    "data": ("on_bad_record", "cache", "data_threads", "data_memory_mb"),
    "model": ("embedding_sharding", "sequence_parallel"),
    "update": ("zero", "zero_prefetch"),
}
"""By section: the length of the run, how samples are read, and what each rank holds and computes at a time."""
PLACES = ("path", "validation_path")
"""Arguments for the location of samples, which are compared with those that the run began with."""


AUTO = Path("auto")
"""The value of --resume that goes on with the run in --run-dir, if there is one. A folder of that name has others."""


@dataclass(frozen=True)
class Files:
    """What a command line says besides the configuration: mostly paths."""

    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """YAML file with options; those on the command line override it."""
    run_dir: Path | None = None
    """Folder of the run, new or empty; runs/RECIPE-DATE-TIME by default."""
    resume: Path | None = None
    """Go on with the run in this folder, from its newest good checkpoint. `auto`: that in --run-dir, or start it."""
    dry_run: int | None = None
    """Show how so many ranks would be laid out, refuse what a start on them would, and start none."""

    @property
    def resumed(self) -> Path | None:
        """The folder of the run to go on with; None where only rank 0 will see whether there is one."""
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
        return _help(argv)
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
        trace=_trace,
    )


def parse(argv: list[str], read: FilesRead | None = None) -> Request:
    """Parse `[RECIPE] [--option value …]`: flags override the file, which overrides the recipe.

    Raises:
        UserError: an unknown recipe or option, a wrong type, or an invalid file.
    """
    name, flags = _recipe_name(argv)
    refuse_unknown(flags, known_options())
    with parse_errors_as_user_errors():
        files, rest = tyro.cli(Files, args=flags, return_unknown_args=True, add_help=False)
    read = read or FilesRead()
    start = _start(files, read)
    base = located(_base(name, files, read), start)
    with parse_errors_as_user_errors():
        config = _parse_config(base, rest)
    if files.resumed is not None:
        # Only the location is given on resume; the other arguments stay.
        merged = {**base.data.data_args, **config.data.data_args}
        config = replace(config, data=replace(config.data, data_args=merged))
        _check_resume(base, config, files.resumed)
    if start is not None:
        config = check_located(given_here(base, config), start)
    return Request(config, files, start)


def _start(files: Files, read: FilesRead) -> Path | None:
    """Return the folder in which the run was started whose configuration is taken over."""
    if files.resumed is not None:
        return start_folder(RunFolder(files.resumed), read)
    return None if files.config_file is None else start_folder(RunFolder(files.config_file.parent), read)


def known_options() -> dict[str, Option]:
    """Return all options of a run, by flag."""
    of_config = (option for section in sections_of(Config("")).values() for option in options_of(section))
    return {option.flag: option for option in (*options_of(Files), *of_config, options_of(Config)[0])}


def _recipe_name(argv: list[str]) -> tuple[str | None, list[str]]:
    if argv and not argv[0].startswith("-"):
        return argv[0], argv[1:]
    return None, argv


def _base(name: str | None, files: Files, read: FilesRead) -> Config:
    """Return the configuration that flags override."""
    if files.resume == AUTO and files.run_dir is None:
        raise ConfigError("--resume auto needs --run-dir: the folder of the run to go on with, or to start.")
    if files.resumed is not None:
        if name is not None or files.config_file is not None or files.run_dir is not None:
            raise ConfigError("--resume goes on with a run as it was: it takes no recipe, --config or --run-dir.")
        from hvdtrain.runs.folder import opened

        return opened(files.resumed, "--resume", read)[1]
    if files.config_file is None:
        return recipe(name or DEFAULT)
    values = read_values(files.config_file, read)
    declared = values.get("recipe", name or DEFAULT)
    if name is not None and declared != name:
        raise ConfigError(f"--config {files.config_file} is of the recipe {declared!r}, not of {name!r}.")
    base, origin = recipe(str(declared)), f"--config {files.config_file}"
    return apply_values(without_foreign_arguments(base, apply_values(base, values, origin)), values, origin)


def _parse_config(base: Config, flags: list[str], program: str = "python -m hvdtrain train") -> Config:
    marks = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagConversionOff)
    kind = Annotated[Config, tyro.conf.arg(name="")]
    # Existing pairs would become flags of their own: --model-args.depth 8.
    blank = {part: replace(getattr(base, part), **{args: {}}) for part, _, args in NAMED_WITH_ARGUMENTS}
    config = tyro.cli(
        kind, args=_with_joined_pairs(with_values(flags)), default=replace(base, **blank), prog=program, config=marks
    )
    config = with_arguments_of(config, without_foreign_arguments(base, config))
    if config.recipe != base.recipe:
        raise ConfigError(f"The recipe is the first word: python -m hvdtrain {config.recipe}.")
    return config


def _with_joined_pairs(flags: list[str]) -> list[str]:
    """Append the pairs of a repeated --model-args to those of the first one; the parser would keep the last alone."""
    repeatable = {f"--{args.replace('_', '-')}" for _, _, args in NAMED_WITH_ARGUMENTS}
    current: list[str] = []
    options = [current]
    first: dict[str, list[str]] = {}
    for word in flags:
        if word in first:
            current = first[word]
        elif word.startswith("--"):
            current = [word]
            options.append(current)
            if word in repeatable:
                first[word] = current
        else:
            current.append(word)
    return [word for option in options for word in option]


def with_values(flags: list[str]) -> list[str]:
    """Add the value True to bare switches (--jit), and normalize the case of true and false."""
    switches = {
        f"--{option.name.replace('_', '-')}"
        for section in vars(Config("")).values()
        if is_dataclass(section)
        for option in fields(section)
        if isinstance(getattr(section, option.name), bool)
    }
    spelled: list[str] = []
    for place, word in enumerate(flags):
        after = flags[place + 1 : place + 2]
        if word in switches and (not after or after[0].startswith("--")):
            spelled += [word, "True"]
        elif spelled and spelled[-1] in switches and word in ("true", "false"):
            spelled.append(word.capitalize())
        else:
            spelled.append(word)
    return spelled


def _check_resume(base: Config, config: Config, run: Path) -> None:
    kept = {name: getattr(config, name) for name in FREE_ON_RESUME}
    kept |= {name: _with_free(name, getattr(base, name), getattr(config, name)) for name in FREE_OPTIONS}
    if replace(base, **kept) != config:
        flags = ", ".join(f"--{name.replace('_', '-')}" for names in FREE_OPTIONS.values() for name in names)
        raise ConfigError(
            f"--resume {run} goes on with the run as it was: only {flags}, where its data are (--data-args path) and "
            f"the options of {', '.join(FREE_ON_RESUME)} may change."
        )


def _with_free(section: str, kept: Any, chosen: Any) -> Any:
    """Return the options `kept` of a section, with those of `chosen` that may change, and its location of the data."""
    options = {name: getattr(chosen, name) for name in FREE_OPTIONS[section]}
    if section == "data":
        places = {name: value for name, value in chosen.data_args.items() if name in PLACES}
        options["data_args"] = {**kept.data_args, **places}
    return replace(kept, **options)


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    files = {name: str(value) for name, value in vars(request.files).items() if value is not None}
    files.pop("config_file", None)
    return request.config.processes, {"the configuration": digest(request.config), **files}


def _trace(request: Request) -> TraceConfig | None:
    reported = request.config.observability
    return trace_config(reported.timeline, reported.profile, reported.profile_ranks)


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
    """Return the run's folder, and whether to go on with the run in it; see `runs.resume.Resume`."""
    from hvdtrain.runs.folder import default_path, opened, refuse_occupied

    files = request.files
    if files.resumed is not None:
        return str(files.resumed), "yes"
    path = files.run_dir or default_path(request.config.recipe)
    if files.resume == AUTO and RunFolder(path).config.is_file():
        _check_resume(opened(path, "--resume auto")[1], request.config, path)
        return str(path), "auto"
    refuse_occupied(path)
    return str(path), "no"


def _help(argv: list[str]) -> int:
    """Print the options, or those of the group after --help, with the recipe's values; on rank 0 only."""
    name, flags = _recipe_name(argv)
    if detect_environment().rank > 0:
        return 0
    try:
        config = recipe(name or DEFAULT)
        group = _group_asked_for(flags)
        print(overview(config, Files, name) if group is None else group_help(config, group))
    except UserError as error:
        print(f"hvdtrain: error: {on_command_line(error.message)}", file=sys.stderr)
        return 2
    own = _arguments(config)
    if own:
        print("\n".join(wrapped(f"Its own arguments: {own}")))
    return 0


def _group_asked_for(flags: list[str]) -> str | None:
    """Return the word after --help."""
    place = next(place for place, word in enumerate(flags) if word in ("-h", "--help"))
    after = flags[place + 1 : place + 2]
    return after[0] if after and not after[0].startswith("-") else None


def _arguments(config: Config) -> str:
    """Format the arguments of a configuration as flags."""
    words = []
    for part, _, name in NAMED_WITH_ARGUMENTS:
        pairs = getattr(getattr(config, part), name).items()
        if pairs:
            words += [f"--{name.replace('_', '-')}", *(str(word) for pair in pairs for word in pair)]
    return " ".join(words)
