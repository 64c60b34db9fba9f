"""`generate`: continue a text with the language model of a run."""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.cli.launch import parse_errors_as_user_errors, positive, run_on_all_ranks, shows_help
from hvdtrain.cli.output import Output
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.files import FilesRead, digest
from hvdtrain.config.run import Config
from hvdtrain.config.runtime import RuntimeConfig
from hvdtrain.runtime.session import Session

if TYPE_CHECKING:
    from hvdtrain.runs.use.generate import Sampling

EPILOG = """\
The text is written as it comes, the prompt first. The same seed gives the same text.

  python -m hvdtrain generate runs/shakespeare --prompt "ROMEO:" --length 500 --temperature 0.8 --top-k 20
"""


@dataclass(frozen=True)
class Request:
    """A parsed command line."""

    config: Config
    run_dir: Path
    prompt: str
    length: int
    temperature: float
    top_k: int | None
    seed: int
    samples: int
    checkpoint: str
    files: FilesRead = field(default_factory=FilesRead, compare=False)
    """Those of the run, as the first rank sees them."""

    def sampling(self) -> "Sampling":
        """Return how tokens are drawn.

        Raises:
            ConfigError: a value out of range.
        """
        from hvdtrain.runs.use.generate import Sampling

        return Sampling(self.length, self.temperature, self.top_k, self.seed)


def main(argv: list[str]) -> int:
    """Generate text and return the exit code."""
    if shows_help(_parser(), argv):
        return 0
    return run_on_all_ranks(lambda files: parse(argv, files), _describe, _generate)


def parse(argv: list[str], files: FilesRead | None = None) -> Request:
    """Parse `RUN --prompt TEXT [--length N] …`.

    Raises:
        UserError: a wrong option, no run in that folder, or no prompt.
    """
    from hvdtrain.runs.description import described
    from hvdtrain.runs.folder import opened
    from hvdtrain.runs.places import located, start_folder

    files = files or FilesRead()
    with parse_errors_as_user_errors():
        given = _parser().parse_args(argv)
    folder, config = opened(given.run_dir, "generate", files)
    described(folder, "generate", files)  # refused before TensorFlow starts
    prompt = given.prompt if given.prompt_file is None else _read(given.prompt_file, files)
    if not prompt:
        raise ConfigError("--prompt needs at least one character: what follows it is generated.")
    return Request(
        config=located(config, start_folder(folder, files)),
        run_dir=given.run_dir,
        prompt=prompt,
        length=given.length,
        temperature=given.temperature,
        top_k=given.top_k,
        seed=given.seed,
        samples=given.samples,
        checkpoint=given.checkpoint,
        files=files,
    )


def _read(file: Path, files: FilesRead) -> str:
    try:
        return files.text(file)
    except OSError as error:
        raise ConfigError(f"--prompt-file {file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {file} is not UTF-8: {error}.") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain generate",
        description="Continue a text with the language model of a run.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN", help="folder of the run")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue")
    prompt.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file that holds it")
    add("--length", type=positive, default=200, metavar="N", help="tokens to generate (default: 200)")
    add("--temperature", type=_temperature, default=0.8, metavar="T",
        help="below 1 likely tokens become likelier; 0 takes the likeliest (default: 0.8)")  # fmt: skip
    add("--top-k", type=positive, metavar="K", help="draw from the K likeliest tokens (default: from all)")
    add("--seed", type=_not_negative, default=0, metavar="S", help="seed of the draws (default: 0)")
    add("--samples", type=positive, default=1, metavar="N", help="number of continuations (default: 1)")
    add("--checkpoint", default="newest", metavar="WHICH", help="newest (default), best, or the number of a step")
    return parser


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of at least 0. Received: {text!r}.")
    return value


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0. Received: {text!r}.")
    return int(text)


def _describe(request: Request) -> tuple[RuntimeConfig, dict[str, str]]:
    facts = {name: str(value) for name, value in vars(request).items() if name not in ("config", "files")}
    return RuntimeConfig(), {"the configuration": digest(request.config), **facts}


def _generate(session: Session, request: Request) -> None:
    from hvdtrain.runs.description import described
    from hvdtrain.runs.folder import RunFolder
    from hvdtrain.runs.use.generate import generate

    folder = RunFolder(request.run_dir)
    description, write = described(folder, "generate", request.files), Output(sys.stdout).write
    generate(
        session,
        config=request.config,
        folder=folder,
        description=description,
        prompt=request.prompt,
        sampling=request.sampling(),
        write=write,
        samples=request.samples,
        checkpoint=request.checkpoint,
    )
