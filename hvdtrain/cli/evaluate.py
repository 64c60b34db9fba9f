"""`evaluate`: evaluate a checkpoint of a run on its validation data, or on other data."""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hvdtrain.cli.launch import parse_errors_as_user_errors, positive, run_on_all_ranks, shows_help
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, digest
from hvdtrain.config.model import Scalar
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import BackendName, RuntimeConfig
from hvdtrain.runtime.session import Session

if TYPE_CHECKING:
    from hvdtrain.runs.use.evaluate import Evaluated

OF_THE_SPLIT = ("validation", "validation_path")
"""Arguments of the run's data that do not apply to other data."""
EPILOG = """\
Other data are prepared as the run's were: the same size, scale, mean, vocabularies and tokenizer, and labels by the
names of their classes. --data-args alone takes the other arguments from the run:
  python -m hvdtrain evaluate runs/flowers --data-args path more_flowers
Where other data have no validation samples of their own, all samples are evaluated.

evaluation.json holds the figures of the run's own validation data, and evaluation-NAME.json those of anything else.
"""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    run_dir: Path
    checkpoint: str = "newest"
    other_data: bool = False
    split: str | None = None
    files: FilesRead = field(default_factory=FilesRead, compare=False)
    """Those of the run, as the first rank sees them."""


def main(argv: list[str]) -> int:
    """Evaluate a run and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    return run_on_all_ranks(lambda files: parse(argv, files), _describe, _evaluate)


def parse(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN_DIR [--data NAME] [--data-args NAME VALUE …] [--checkpoint WHICH] …`.

    Raises:
        UserError: a wrong option, or no run in that folder.
    """
    from hvdtrain.runs.description import read_description
    from hvdtrain.runs.folder import opened
    from hvdtrain.runs.places import check_located, located, start_folder

    files = files or FilesRead()
    with parse_errors_as_user_errors():
        arguments = _parser().parse_args(argv)
    folder, config = opened(arguments.run_dir, "evaluate", files)
    given, other = paired(arguments.data_args), arguments.data is not None or bool(arguments.data_args)
    start = start_folder(folder, files)
    read_description(folder, files)
    config = located(config, start)
    config = check_located(_with_data(config, arguments.data, given) if other else config, start)
    changes = {"eval_batch": arguments.batch, "on_bad_record": arguments.on_bad_record}
    data = replace(config.data, **{name: value for name, value in changes.items() if value is not None})
    # The runtime options of the training do not apply to this machine.
    config = replace(config, data=data, runtime=RuntimeConfig(backend=arguments.backend, replicas=arguments.replicas))
    return Request(
        config=config,
        run_dir=arguments.run_dir,
        checkpoint=arguments.checkpoint,
        other_data=other,
        split=arguments.split,
        files=files,
    )


def _with_data(config: Config, name: str | None, given: dict[str, Scalar]) -> Config:
    """Return `config` with other data; arguments that are not given are those of the run on the same source."""
    data = config.data
    if name is None or name == data.data:
        given = {**{key: value for key, value in data.data_args.items() if key not in OF_THE_SPLIT}, **given}
    return replace(config, data=replace(data, data=name or data.data, data_args=given))


def paired(words: list[str]) -> dict[str, Scalar]:
    """Return arguments from NAME VALUE pairs.

    Raises:
        ConfigError: a name without a value.
    """
    if len(words) % 2:
        raise ConfigError(f"--data-args takes NAME VALUE pairs. Received: {' '.join(words)!r}.")
    return {name: _value(text) for name, text in zip(words[::2], words[1::2], strict=True)}


def _value(text: str) -> Scalar:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain evaluate",
        description="Evaluate a checkpoint of a run on its validation data, or on other data.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="folder of the run")
    add("--data", metavar="NAME", help="another data source, or MODULE:FUNCTION (default: the run's)")
    add("--data-args", nargs="+", default=[], metavar="NAME VALUE", help="its arguments, as in training")
    add("--split", choices=("validation", "train", "all"), help="samples of the data to evaluate (default: see below)")
    add(
        "--checkpoint",
        default="newest",
        metavar="WHICH",
        help="newest (default), best, or the number of a step",
    )
    add("--batch", type=positive, metavar="N", help="samples per step over all ranks (default: the run's)")
    add(
        "--on-bad-record",
        metavar="HOW",
        help="raise, or skip:N: skip up to N unreadable samples (default: the run's)",
    )
    add("--backend", choices=get_args(BackendName), default="auto", help="who distributes (default: auto)")
    add("--replicas", type=int, default=None, metavar="N", help="replicas in the one process of mirrored")
    return parser


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    facts = {name: str(value) for name, value in vars(request).items() if name not in ("config", "files")}
    return request.config.runtime, {"the configuration": digest(request.config), **facts}


def _evaluate(session: Session, request: Request) -> None:
    from hvdtrain.runs.description import read_description
    from hvdtrain.runs.folder import RunFolder
    from hvdtrain.runs.reporting import left_out_line
    from hvdtrain.runs.use.evaluate import EvaluateOptions, evaluate

    options: Any = EvaluateOptions(request.checkpoint, request.other_data, request.split)  # type: ignore[arg-type]
    folder = RunFolder(request.run_dir)
    done = evaluate(
        session,
        config=request.config,
        folder=folder,
        options=options,
        description=read_description(folder, request.files),
    )
    if session.world.primary:
        message = left_out_line(done.figures.get("left_out", []), done.file.name)
        print("\n".join(filter(None, [message, _line(done)])), flush=True)


def _line(done: "Evaluated") -> str:
    figures = done.figures
    values = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name.startswith("val_"))
    samples = "streamed" if figures["samples"] is None else f"{figures['samples']:,} samples"
    return f"step {figures['step']}  {values}  ({samples}, {done.file})"
