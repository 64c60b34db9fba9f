"""`predict`: predict images, rows of a table or arrays with the model of a run."""

import argparse
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.cli.launch import parse_errors_as_user_errors, positive, run_on_all_ranks, shows_help
from hvdtrain.cli.output import opened_output
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, digest
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.control.agreement import on_first
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session

STANDARD_INPUT = "-"
EPILOG = """\
PATH is, by what the run was trained on:
  images   image files, folders, tar files, patterns ("photos/*.jpg"), or pixels in an .npz or .npy file
  a table  a CSV file with the run's columns (the target may be missing), or JSON objects in lines (.jsonl)
  arrays   an .npz or .npy file with the model's inputs
Standard input (-) takes a path of an image in each line, CSV or JSON lines, or the bytes of an .npz file.

Each line of the output names the sample (path, or row, from 0) and the predicted class with its probability, or the
values that the model returns. On several ranks use --out: launchers may mark each line of the standard output.

  python -m hvdtrain predict runs/flowers photos/ --top 3 > predictions.csv
  cat new.csv | python -m hvdtrain predict runs/prices - --format jsonl
"""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    run_dir: Path
    paths: tuple[str, ...]
    out: Path | None
    form: str
    top: int
    probabilities: bool
    checkpoint: str
    batch_size: int
    tolerated: int
    files: FilesRead = field(default_factory=FilesRead, compare=False)
    """Those of the run, as the first rank sees them."""


def main(argv: list[str]) -> int:
    """Predict and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    return run_on_all_ranks(lambda files: parse(argv, files), _describe, _predict)


def parse(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN PATH … [--out FILE] [--format csv|jsonl] …`.

    Raises:
        UserError: a wrong option, or no run in that folder.
    """
    from hvdtrain.runs.description import described
    from hvdtrain.runs.folder import opened
    from hvdtrain.runs.places import located, start_folder

    files = files or FilesRead()
    with parse_errors_as_user_errors():
        given = _parser().parse_args(argv)
    folder, config = opened(given.run_dir, "predict", files)
    described(folder, "predict", files)  # refused before TensorFlow starts
    if STANDARD_INPUT in given.paths and len(given.paths) > 1:
        raise ConfigError(f"- stands for standard input, by itself. Received: {' '.join(given.paths)}.")
    if given.out is not None and detect_environment().rank == 0 and not _is_writable(given.out):
        raise ConfigError(f"--out takes the name of a file in a folder that exists. Received: {given.out}.")
    if given.top > 1 and given.probabilities and given.form == "csv":
        raise ConfigError("--probabilities holds all classes: leave out --top, or use --format jsonl.")
    return Request(
        config=located(config, start_folder(folder, files)),
        run_dir=given.run_dir,
        paths=tuple(given.paths),
        out=given.out,
        form=given.form,
        top=given.top,
        probabilities=given.probabilities,
        checkpoint=given.checkpoint,
        batch_size=given.batch_size,
        tolerated=_tolerated(given.on_bad_record),
        files=files,
    )


def _is_writable(file: Path) -> bool:
    """Whether `file` can be one: asked on the first rank alone, which writes it, as hosts may share no folder."""
    return not file.is_dir() and file.absolute().parent.is_dir()


def _tolerated(how: str) -> int:
    number = how.removeprefix("skip:")
    if how != "raise" and not (how.startswith("skip:") and number.isdecimal() and int(number)):
        raise ConfigError(f"--on-bad-record must be raise or skip:N. Received: {how!r}.")
    return 0 if how == "raise" else int(number)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain predict",
        description="Predict images, rows of a table or arrays with the model of a run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="folder of the run")
    add("paths", nargs="+", metavar="PATH", help="what to predict, or - for standard input")
    add("--out", type=Path, metavar="FILE", help="file for the predictions (default: standard output)")
    add("--format", dest="form", choices=("csv", "jsonl"), default="csv", help="format of the output (default: csv)")
    add("--top", type=positive, default=1, metavar="K", help="the K most probable classes (default: 1)")
    add("--probabilities", action="store_true", help="add the probability of every class")
    add("--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step")
    add("--batch-size", type=positive, default=64, metavar="N", help="samples per step on each rank (default: 64)")
    add(
        "--on-bad-record",
        default="raise",
        metavar="HOW",
        help="raise (default), or skip:N: up to N unreadable samples get a line that says why",
    )
    return parser


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    facts = {name: str(value) for name, value in vars(request).items() if name not in ("config", "files")}
    return RuntimeConfig(), {"the configuration": digest(request.config), **facts}


def _predict(session: Session, request: Request) -> None:
    from hvdtrain.data.prediction import samples_from
    from hvdtrain.runs.description import described
    from hvdtrain.runs.folder import RunFolder
    from hvdtrain.runs.use.predict import PredictOptions, RowFormat, predict

    folder = RunFolder(request.run_dir)
    description = described(folder, "predict", request.files)
    samples = samples_from(request.paths, _given(session, request), description.preprocessing, description.inputs)
    rows = RowFormat(request.form, request.top, request.probabilities)  # type: ignore[arg-type]
    options = PredictOptions(request.checkpoint, request.batch_size, request.tolerated, rows)
    with opened_output(request.out if session.world.primary else Path(os.devnull)) as out:
        bad = predict(
            session,
            config=request.config,
            folder=folder,
            description=description,
            samples=samples,
            options=options,
            write=out.write,
        )
    if session.world.primary and bad:
        print(f"warning: {bad} of {samples.source.size} could not be read: their lines say why.", file=sys.stderr)


def _given(session: Session, request: Request) -> bytes | None:
    """Return the bytes of rank 0's standard input on every rank; None if paths are named."""
    if request.paths != (STANDARD_INPUT,):
        return None
    timeout = request.config.runtime.load_timeout
    return on_first(session.control, lambda: sys.stdin.buffer.read(), timeout=timeout)
