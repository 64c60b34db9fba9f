"""The options of a dataclass as the command line knows them: for help and suggestions."""

import ast
import difflib
import inspect
import textwrap
import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from hvdtrain.config.errors import UserError

ALIASES = {
    "lr": "learning-rate",
    "lr-schedule": "schedule",
    "lr-scheduler": "schedule",
    "scheduler": "schedule",
    "warmup": "warmup-steps",
    "b": "batch",
    "bs": "batch",
    "batch-size": "batch",
    "global-batch-size": "batch",
    "eval-batch-size": "eval-batch",
    "val-batch-size": "eval-batch",
    "e": "epochs",
    "num-epochs": "epochs",
    "max-epochs": "epochs",
    "n-epochs": "epochs",
    "num-train-epochs": "epochs",
    "steps": "max-steps",
    "num-steps": "max-steps",
    "wd": "weight-decay",
    "opt": "optimizer",
    "optim": "optimizer",
    "clip": "clip-norm",
    "grad-clip": "clip-norm",
    "max-grad-norm": "clip-norm",
    "grad-accum": "accumulate",
    "gradient-accumulation": "accumulate",
    "gradient-accumulation-steps": "accumulate",
    "accumulation-steps": "accumulate",
    "amp": "precision",
    "fp16": "precision",
    "bf16": "precision",
    "dtype": "precision",
    "mixed-precision": "precision",
    "xla": "jit",
    "arch": "model",
    "network": "model",
    "dataset": "data",
    "data-dir": "data-args",
    "data-path": "data-args",
    "workers": "data-threads",
    "num-workers": "data-threads",
    "j": "data-threads",
    "out": "run-dir",
    "output": "run-dir",
    "output-dir": "run-dir",
    "logdir": "run-dir",
    "log-dir": "run-dir",
    "checkpoint-dir": "run-dir",
    "save-every": "checkpoint-every",
    "save-steps": "checkpoint-every",
    "log-interval": "log-every",
    "resume-from": "resume",
    "strategy": "backend",
    "c": "config",
}
"""What other programs call an option -> what it is called here."""
OF_THE_LAUNCHER = ("np", "n", "nproc", "nproc-per-node", "gpus", "num-gpus", "num-proc", "world-size", "ranks")
"""What other programs call the number of processes."""


@dataclass(frozen=True)
class Option:
    """An option of the command line."""

    flag: str
    value: str
    """What follows the flag: INT, NAME VALUE …, or the choices, separated by commas."""
    choices: tuple[str, ...]
    """The values that it takes; empty where they are not a few words."""
    default: Any
    help: str
    """What it means, in one or several sentences."""

    @property
    def is_path(self) -> bool:
        """Whether its value is a file or folder."""
        return self.value == "PATH"


def sections_of(config: Any) -> dict[str, Any]:
    """Return the sections of a configuration by name."""
    return {name: part for name, part in vars(config).items() if is_dataclass(part)}


def options_of(section: Any) -> list[Option]:
    """Return the options of a dataclass or an instance of one, whose values are then the defaults."""
    kind: Any = section if inspect.isclass(section) else type(section)
    hints, docs = get_type_hints(kind, include_extras=True), _docs(kind)
    return [
        Option(
            flag=_flag(field.name, hints[field.name]),
            value=_value(hints[field.name]),
            choices=_choices(hints[field.name]),
            default=getattr(section, field.name, None if field.default is MISSING else field.default),
            help=docs.get(field.name, ""),
        )
        for field in fields(kind)
    ]


def refuse_unknown(words: Iterable[str], known: Mapping[str, Option]) -> None:
    """Refuse flags that are no options, with a hint at those that were meant.

    Args:
        words: of the command line.
        known: all options, by flag.

    Raises:
        UserError: naming every such flag.
    """
    flags = [word.partition("=")[0] for word in words if _looks_like_a_flag(word)]
    unknown = [flag for flag in dict.fromkeys(flags) if flag.replace("_", "-") not in known]
    if unknown:
        raise UserError("\n".join(_hint(flag, known) for flag in unknown))


def _looks_like_a_flag(word: str) -> bool:
    if word.startswith("--"):
        return len(word) > 2
    return len(word) > 1 and word[0] == "-" and word[1].isalpha() and word[1:] not in ("inf", "nan")


def _hint(flag: str, known: Mapping[str, Option]) -> str:
    name = flag.lstrip("-").replace("_", "-").lower()
    if name in OF_THE_LAUNCHER:
        return f"There is no option {flag!r}: the number of processes is the launcher's, as in horovodrun -np 2 ..."
    switch = f"--{name.removeprefix('no-')}"
    if name.startswith("no-") and switch in known and known[switch].choices == ("True", "False"):
        return f"There is no option {flag!r}. Perhaps you meant: {switch} False."
    meant = (
        f"--{ALIASES[name]}" if name in ALIASES else next(iter(difflib.get_close_matches(f"--{name}", known, 1)), "")
    )
    if meant not in known:
        return f"There is no option {flag!r}. --help lists those that there are."
    option = known[meant]
    return f"There is no option {flag!r}. Perhaps you meant: {meant} {option.value}\n    {option.help}"


def _flag(name: str, hint: Any) -> str:
    renamed = next((mark.name for mark in getattr(hint, "__metadata__", ()) if getattr(mark, "name", None)), None)
    return f"--{(renamed or name).replace('_', '-')}"


def _plain(hint: Any) -> Any:
    """Return a type without annotations and None."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return next(_plain(part) for part in get_args(hint) if part is not type(None))
    return hint


def _choices(hint: Any) -> tuple[str, ...]:
    kind = _plain(hint)
    if kind is bool:
        return ("True", "False")
    return tuple(map(str, get_args(kind))) if get_origin(kind) is Literal else ()


def _value(hint: Any) -> str:
    """Return what to type after a flag."""
    kind = _plain(hint)
    if _choices(hint):
        return ",".join(_choices(hint))
    if get_origin(kind) is dict:
        return "NAME VALUE ..."
    if get_origin(kind) is tuple:
        return f"{_value(get_args(kind)[0])} ..."
    return {int: "INT", float: "FLOAT", Path: "PATH"}.get(kind, "NAME")


def _docs(kind: type) -> dict[str, str]:
    """Return what is written below each field of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if is_dataclass(base):
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            docs |= {
                ast.unparse(field.target): " ".join(_text(below).split())
                for field, below in pairwise(definition.body)
                if isinstance(field, ast.AnnAssign)
            }
    return docs


def _text(node: ast.stmt) -> str:
    """Return the text of a statement that is nothing else."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""
