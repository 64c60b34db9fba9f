"""`evaluate`, `predict` and `generate`: use the model of a run, on as many ranks as one likes."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, get_args

from hvdtrain.cli.parser import Parser, pairs, positive, shows_help
from hvdtrain.cli.running import run_on_all_ranks
from hvdtrain.config.data import DataConfig
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, digest
from hvdtrain.config.model import Sampling
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import BackendName, RuntimeConfig
from hvdtrain.runs.folder import RunFolder, check_located, located, opened, start_folder
from hvdtrain.runtime.control.agreement import on_first
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import Session

if TYPE_CHECKING:
    from hvdtrain.runs.description import RunDescription


@dataclass(frozen=True)
class Request:
    """A parsed command line, and the run that it names."""

    arguments: argparse.Namespace
    config: Config
    runtime: RuntimeConfig
    """Runtime options of this job; those of the training do not apply to this machine."""
    description: "RunDescription" = field(compare=False)
    """The run's, as the first rank reads it."""

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.arguments.run_dir)

    def described(self) -> tuple[RuntimeConfig, dict[str, str]]:
        """Return the runtime options, and the values that must agree on all ranks."""
        facts = {name: str(value) for name, value in vars(self.arguments).items()}
        return self.runtime, {"the configuration": digest(self.config), **facts}


def _parser(verb: str, description: str, epilog: str) -> Parser:
    parser = Parser(verb, description, epilog=epilog)
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step"
    )
    return parser


def _run(
    parser: Parser,
    argv: list[str],
    parse: Callable[[list[str], FilesRead], Request],
    action: Callable[[Session, Request], None],
) -> int:
    if shows_help(parser, argv):
        return 0
    return run_on_all_ranks(lambda files: parse(argv, files), Request.described, action)


# -- evaluate --

OF_THE_SPLIT = ("validation", "validation_path")
"""Arguments of the run's data that do not apply to other data."""
_EVALUATE_EPILOG = """\
Other data are prepared as the run's were: the same size, scale, mean, vocabularies and tokenizer, and labels by the
names of their classes. --data-args alone takes the other arguments from the run:
  python -m hvdtrain evaluate runs/flowers --data-args path more_flowers
Where other data have no validation samples of their own, all samples are evaluated.

evaluation.json holds the figures of the run's own validation data, and evaluation-NAME.json those of anything else.
"""


def evaluate(argv: list[str]) -> int:
    """Evaluate a run and return the exit code."""
    return _run(_evaluate_parser(), argv, parse_evaluate, _evaluate)


def _evaluate_parser() -> Parser:
    text = "Evaluate a checkpoint of a run on its validation data, or on other data."
    parser = _parser("evaluate", text, _EVALUATE_EPILOG)
    add = parser.add_argument
    add("--data", metavar="NAME", help="another data source, or MODULE:FUNCTION (default: the run's)")
    add("--data-args", nargs="+", default=[], metavar="NAME VALUE", help="its arguments, as in training")
    add("--split", choices=("validation", "train", "all"), help="samples of the data to evaluate (default: see below)")
    add("--batch", type=positive, metavar="N", help="samples per step over all ranks (default: the run's)")
    skip = "raise, or skip:N: skip up to N unreadable samples (default: the run's)"
    add("--on-bad-record", metavar="HOW", help=skip)
    add("--backend", choices=get_args(BackendName), default="auto", help="who distributes (default: auto)")
    add("--replicas", type=int, default=None, metavar="N", help="replicas in one process")
    return parser


def parse_evaluate(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN [--data NAME] [--data-args NAME VALUE …] [--checkpoint WHICH] …`.

    Raises:
        UserError: a wrong option, or no run in that folder.
    """
    from hvdtrain.runs.description import read_description

    files = files or FilesRead()
    arguments = _evaluate_parser().parse_args(argv)
    folder, config = opened(arguments.run_dir, "evaluate", files)
    given, name = pairs("--data-args", arguments.data_args), arguments.data
    arguments.other_data = name is not None or bool(given)
    start = start_folder(folder, files)
    description = read_description(folder, "evaluate", files)
    config = located(config, start)
    data = config.data
    if arguments.other_data:
        if name in (None, data.data):  # the other arguments are the run's
            given = {**{key: value for key, value in data.data_args.items() if key not in OF_THE_SPLIT}, **given}
        data = replace(data, data=name or data.data, data_args=given)
    data = check_located(replace(config, data=data), start).data
    changes = {"eval_batch": arguments.batch, "on_bad_record": arguments.on_bad_record}
    data = replace(data, **{name: value for name, value in changes.items() if value is not None})
    runtime = RuntimeConfig(backend=arguments.backend, replicas=arguments.replicas)
    return Request(arguments, replace(config, data=data, runtime=runtime), runtime, description)


def _evaluate(session: Session, request: Request) -> None:
    from hvdtrain.runs.evaluate import evaluate
    from hvdtrain.runs.run_files import left_out_line

    arguments = request.arguments
    figures, file = evaluate(
        session,
        config=request.config,
        folder=request.folder,
        description=request.description,
        checkpoint=arguments.checkpoint,
        other_data=arguments.other_data,
        split=arguments.split,
    )
    if session.world.primary:
        values = "  ".join(f"{name} {value:.4f}" for name, value in figures.items() if name.startswith("val_"))
        samples = "streamed" if figures["samples"] is None else f"{figures['samples']:,} samples"
        message = left_out_line(figures.get("left_out", []), file.name)
        line = f"step {figures['step']}  {values}  ({samples}, {file})"
        print("\n".join(filter(None, [message, line])), flush=True)


# -- predict --

STANDARD_INPUT = "-"
_PREDICT_EPILOG = """\
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


def predict(argv: list[str]) -> int:
    """Predict and return the exit code."""
    return _run(_predict_parser(), argv, parse_predict, _predict)


def _predict_parser() -> Parser:
    text = "Predict images, rows of a table or arrays with the model of a run."
    parser = _parser("predict", text, _PREDICT_EPILOG)
    add = parser.add_argument
    add("paths", nargs="+", metavar="PATH", help="what to predict, or - for standard input")
    add("--out", type=Path, metavar="FILE", help="file for the predictions (default: standard output)")
    add("--format", dest="form", choices=("csv", "jsonl"), default="csv", help="format of the output (default: csv)")
    add("--top", type=positive, default=1, metavar="K", help="the K most probable classes (default: 1)")
    add("--probabilities", action="store_true", help="add the probability of every class")
    add("--batch-size", type=positive, default=64, metavar="N", help="samples per step on each rank (default: 64)")
    skip = "raise (default), or skip:N: up to N unreadable images get a line that says why"
    add("--on-bad-record", default="raise", metavar="HOW", help=skip)
    return parser


def parse_predict(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN PATH … [--out FILE] [--format csv|jsonl] …`.

    Raises:
        UserError: a wrong option, or no run in that folder.
    """
    arguments = _predict_parser().parse_args(argv)
    request, out = _described_run(arguments, "predict", files or FilesRead()), arguments.out
    if STANDARD_INPUT in arguments.paths and len(arguments.paths) > 1:
        raise ConfigError(f"- stands for standard input, by itself. Received: {' '.join(arguments.paths)}.")
    # Asked on the first rank alone, which writes it: hosts may share no folder.
    if out is not None and detect_environment().rank == 0 and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise ConfigError(f"--out takes the name of a file in a folder that exists. Received: {out}.")
    if arguments.top > 1 and arguments.probabilities and arguments.form == "csv":
        raise ConfigError("--probabilities holds all classes: leave out --top, or use --format jsonl.")
    arguments.tolerated = DataConfig("", on_bad_record=arguments.on_bad_record).tolerated
    return request


def _described_run(arguments: argparse.Namespace, verb: str, files: FilesRead) -> Request:
    """Return the request; runs that the verb cannot use are refused before TensorFlow starts."""
    from hvdtrain.runs.description import read_description

    folder, config = opened(arguments.run_dir, verb, files)
    description = read_description(folder, verb, files)
    return Request(arguments, located(config, start_folder(folder, files)), RuntimeConfig(), description)


def _predict(session: Session, request: Request) -> None:
    from hvdtrain.data.prediction import samples_from
    from hvdtrain.runs.predict import RowFormat, predict

    arguments = request.arguments
    given: bytes | None = None
    if arguments.paths == [STANDARD_INPUT]:
        timeout = request.config.runtime.load_timeout
        given = on_first(session.control, lambda: sys.stdin.buffer.read(), timeout=timeout)
    description = request.description
    samples = samples_from(tuple(arguments.paths), given, description.preprocessing, description.inputs)
    with opened_output(arguments.out if session.world.primary else None) as out:
        bad = predict(
            session,
            config=request.config,
            folder=request.folder,
            description=description,
            samples=samples,
            write=out.write,
            row_format=RowFormat(arguments.form, arguments.top, arguments.probabilities),
            checkpoint=arguments.checkpoint,
            batch_size=arguments.batch_size,
            tolerated=arguments.tolerated,
        )
    if session.world.primary and bad:
        print(f"warning: {bad} of {samples.source.size} could not be read: their lines say why.", file=sys.stderr)


# -- generate --

_GENERATE_EPILOG = """\
The text is written as it comes, the prompt first. The same seed gives the same text.

  python -m hvdtrain generate runs/shakespeare --prompt "ROMEO:" --length 500 --temperature 0.8 --top-k 20
"""


def generate(argv: list[str]) -> int:
    """Generate text and return the exit code."""
    return _run(_generate_parser(), argv, parse_generate, _generate)


def _generate_parser() -> Parser:
    parser = _parser("generate", "Continue a text with the language model of a run.", _GENERATE_EPILOG)
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds it")
    add = parser.add_argument
    add("--length", type=int, default=200, metavar="N", help="tokens to generate (default: 200)")
    heat = "below 1 likely tokens become likelier; 0 takes the likeliest (default: 0.8)"
    add("--temperature", type=float, default=0.8, metavar="T", help=heat)
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens (default: from all)")
    add("--seed", type=int, default=0, metavar="S", help="seed of the draws (default: 0)")
    add("--samples", type=positive, default=1, metavar="N", help="number of continuations (default: 1)")
    return parser


def parse_generate(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN --prompt TEXT [--length N] …`.

    Raises:
        UserError: a wrong option, no run in that folder, or no prompt.
    """
    files = files or FilesRead()
    arguments = _generate_parser().parse_args(argv)
    arguments.sampling = Sampling(arguments.length, arguments.temperature, arguments.top_k, arguments.seed)
    request = _described_run(arguments, "generate", files)
    file = arguments.prompt_file
    if file is not None:
        try:
            arguments.prompt = files.text(file)
        except OSError as error:
            raise ConfigError(f"--prompt-file {file} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"--prompt-file {file} is not UTF-8: {error}.") from None
    if not arguments.prompt:
        raise ConfigError("--prompt needs at least one character: what follows it is generated.")
    return request


def _generate(session: Session, request: Request) -> None:
    from hvdtrain.runs.generate import generate

    arguments = request.arguments
    generate(
        session,
        config=request.config,
        folder=request.folder,
        description=request.description,
        prompt=arguments.prompt,
        sampling=arguments.sampling,
        write=Output(sys.stdout).write,
        samples=arguments.samples,
        checkpoint=arguments.checkpoint,
    )


# -- standard output, or a file that appears when it is whole --


class Output:
    """Writes lines until the reader of a pipe has gone; what follows is dropped."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._gone = False

    def write(self, text: str) -> None:
        """Write `text` and flush it."""
        if self._gone:
            return
        try:
            self._file.write(text)
            self._file.flush()
        except BrokenPipeError:
            self._gone = True
            # Keep Python from complaining at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())


@contextmanager
def opened_output(out: Path | None) -> Iterator[Output]:
    """Yield the output: standard output for None, else a file that appears when all is written.

    Raises:
        ConfigError: the file cannot be written.
    """
    if out is None:
        yield Output(sys.stdout)
        return
    from hvdtrain.observability.summary import draft_of

    with draft_of(out) as draft:
        try:
            file = draft.open("w", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from None
        with file:
            yield Output(file)
