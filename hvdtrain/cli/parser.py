"""The parser of every verb, options from the fields of dataclasses, hints at mistyped options, and help."""

import argparse
import ast
import difflib
import inspect
import re
import shutil
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from hvdtrain.config.errors import ConfigError, UserError, on_command_line
from hvdtrain.config.facts import described
from hvdtrain.config.model import Scalar
from hvdtrain.config.options import declaration_of, limits_of
from hvdtrain.config.registry import suggestion
from hvdtrain.config.run import Config
from hvdtrain.runtime.launchers import detect_environment

_SYNONYMS = {
    "learning-rate": "lr",
    "schedule": "lr-schedule lr-scheduler scheduler",
    "warmup-steps": "warmup",
    "batch": "b bs batch-size global-batch-size",
    "eval-batch": "eval-batch-size val-batch-size",
    "epochs": "e num-epochs max-epochs n-epochs num-train-epochs",
    "max-steps": "steps num-steps",
    "weight-decay": "wd",
    "optimizer": "opt optim",
    "clip-norm": "clip grad-clip max-grad-norm",
    "accumulate": "grad-accum gradient-accumulation gradient-accumulation-steps accumulation-steps",
    "precision": "amp fp16 bf16 dtype mixed-precision",
    "jit": "xla",
    "model": "arch network",
    "data": "dataset",
    "data-args": "data-dir data-path",
    "data-threads": "workers num-workers j",
    "run-dir": "out output output-dir logdir log-dir checkpoint-dir",
    "checkpoint-every": "save-every save-steps",
    "log-every": "log-interval",
    "resume": "resume-from",
    "backend": "strategy",
    "config": "c",
}
"""Options, and what other programs call them."""
ALIASES = {name: option for option, names in _SYNONYMS.items() for name in names.split()}
OF_THE_LAUNCHER = ("np", "n", "nproc", "nproc-per-node", "gpus", "num-gpus", "num-proc", "world-size", "ranks")
"""Other programs' names for the number of processes."""


_NUMBER = re.compile(r"-(\d|\.\d|inf|nan)")


class Parser(argparse.ArgumentParser):
    """A parser whose mistakes are `UserError`s: they are shown once, by one rank.

    Args:
        verb: with the command, as it is typed.
        description: of the verb, above its options.
        more: arguments of `argparse.ArgumentParser`.
    """

    def __init__(self, verb: str, description: str, **more: Any) -> None:
        self.options: dict[str, argparse.Action] = {}
        """The options by each of their flags."""
        super().__init__(
            f"python -m hvdtrain {verb}",
            description=_filled(description),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            **more,
        )

    def add_argument(self, *names: Any, **options: Any) -> argparse.Action:
        """Add an argument, and note its flags in `options`."""
        return self._noted(super().add_argument(*names, **options))

    def add_mutually_exclusive_group(self, **options: Any) -> Any:
        """Add a group of arguments that exclude one another."""
        group: Any = super().add_mutually_exclusive_group(**options)
        add = group.add_argument
        group.add_argument = lambda *names, **options: self._noted(add(*names, **options))
        return group

    def _noted(self, action: argparse.Action) -> argparse.Action:
        self.options |= dict.fromkeys(action.option_strings, action)
        return action

    def parse_args(self, args: Sequence[str], namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse `args`.

        Raises:
            UserError: a mistake in them; options that do not exist come with a hint.
        """
        given, rest = self.parse_known_args([self._dashed(word) for word in args], namespace)
        unknown = dict.fromkeys(word.partition("=")[0] for word in rest if word[:1] == "-")
        if unknown:
            raise UserError("\n".join(map(self._hint, unknown)))
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return given

    def _dashed(self, word: str) -> str:
        """Return `--eval-batch=a_b` for `--eval_batch=a_b`, and numbers such as `-1e-3` so that they are no options."""
        if _NUMBER.match(word):
            return f" {word}"
        flag, equals, value = word.partition("=")
        dashed = flag.replace("_", "-")
        return dashed + equals + value if dashed in self.options else word

    def split(self, argv: list[str]) -> tuple[list[str], list[str]]:
        """Split `argv` before the first word that belongs to no option of this parser; a `--` there is left out."""
        at = 0
        while at < len(argv):
            flag, equals, _ = argv[at].partition("=")
            if flag not in self.options:
                break
            at += 1 if equals or self.options[flag].nargs == 0 else 2
        return argv[:at], argv[at + 1 :] if argv[at : at + 1] == ["--"] else argv[at:]

    def error(self, message: str) -> NoReturn:
        """Raise `message`, or the `UserError` of a function that converts a value."""
        cause = sys.exception()
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__context__
        raise cause or UserError(f"{message.rstrip('.')}. {self.prog} --help explains the options.") from None

    def _hint(self, flag: str) -> str:
        """Return what to type in place of an option that does not exist."""
        known, name = self.options, flag.lstrip("-").replace("_", "-").lower()
        if name in OF_THE_LAUNCHER:
            return f"There is no option {flag!r}: the number of processes is the launcher's, as in horovodrun -np 2 ..."
        switch = f"--{name.removeprefix('no-')}"
        if name.startswith("no-") and switch in known and known[switch].const is True:
            return f"There is no option {flag!r}. Perhaps you meant: {switch} False."
        near = [f"--{ALIASES.get(name)}", *difflib.get_close_matches(f"--{name}", known, 1)]
        meant = next((option for option in near if option in known), None)
        if meant is None:
            return f"There is no option {flag!r}. {self.prog} --help lists the options."
        option = known[meant]
        value = option.metavar or ",".join(map(str, option.choices or ()))
        shown = f"{meant} {value}".rstrip()
        return f"There is no option {flag!r}. Perhaps you meant: {shown}\n    {option.help or ''}".rstrip()


def _filled(text: str) -> str:
    """Fill the paragraphs of a description, but for those with indented lines."""
    width = shutil.get_terminal_size().columns - 2
    parts = text.strip().split("\n\n")
    return "\n\n".join(part if "\n " in part else textwrap.fill(" ".join(part.split()), width) for part in parts)


def shows_help(parser: argparse.ArgumentParser, argv: Sequence[str]) -> bool:
    """Whether `argv` asks for help; if so, print it on rank 0."""
    asked = bool({"-h", "--help"} & set(argv))
    if asked and detect_environment().rank == 0:
        parser.print_help()
    return asked


# -- types of values --


def positive(text: str) -> int:
    """Convert an integer of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1. Received: {text!r}.")
    return int(text)


def pairs(flag: str, words: Sequence[str]) -> dict[str, Scalar]:
    """Convert the NAME VALUE pairs after `flag`, whose types are read off.

    Raises:
        ConfigError: a name without a value.
    """
    if len(words) % 2:
        raise ConfigError(f"{flag} takes NAME VALUE pairs. Received: {' '.join(words)!r}.")
    return {name: _scalar(text) for name, text in zip(words[::2], words[1::2], strict=True)}


def _scalar(text: str) -> Scalar:
    if text in ("True", "False"):
        return text == "True"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# -- options from dataclasses --


@dataclass(frozen=True)
class Option:
    """An option of the command line, which sets a field of a dataclass."""

    field: str
    kind: Any
    """Type of its value, without None."""
    optional: bool
    default: Any
    help: str
    """One or several sentences."""
    rules: str = ""
    """What it needs and excludes, as sentences with encoded options."""
    limits: str = ""
    """Valid numbers, such as "at least 1"."""

    @property
    def flag(self) -> str:
        """The flag, such as `--learning-rate`."""
        return f"--{self.field.replace('_', '-')}"

    @property
    def choices(self) -> dict[str, Any]:
        """The values by the words for them; empty if there are more than a few."""
        if self.kind is bool:
            return {"True": True, "False": False}
        return {str(choice): choice for choice in get_args(self.kind)} if get_origin(self.kind) is Literal else {}

    @property
    def value(self) -> str:
        """Placeholder after the flag: INT, NAME VALUE …, or the choices."""
        if get_origin(self.kind) is dict:
            return "NAME VALUE ..."
        if get_origin(self.kind) is tuple:
            return f"{_WORDS[get_args(self.kind)[0]]} ..."
        return ",".join(self.choices) or _WORDS[self.kind]

    @property
    def shown_default(self) -> str:
        """The default as it is typed."""
        if isinstance(self.default, dict):
            return " ".join(f"{name} {each}" for name, each in self.default.items()) or "none"
        return " ".join(map(str, self.default)) or "none" if isinstance(self.default, tuple) else str(self.default)

    def add_to(self, parser: Parser, section: str) -> None:
        """Add the option to `parser`, as the attribute `section.field` of what it returns."""
        nargs: dict[Any, dict[str, Any]] = {
            dict: {"nargs": "+", "action": "extend"},
            tuple: {"nargs": "*"},
            bool: {"nargs": "?", "const": True},
        }
        parser.add_argument(
            self.flag,
            dest=f"{section}.{self.field}",
            type=str if get_origin(self.kind) is dict else self._converted,
            default=argparse.SUPPRESS,
            metavar=self.value,
            help=self.help,
            **nargs.get(get_origin(self.kind) or self.kind, {}),
        )

    def _converted(self, text: str) -> Any:
        if self.optional and text == "None":
            return None
        unset = ", or None" if self.optional else ""
        if self.choices:
            word = text.capitalize() if self.kind is bool else text
            if word not in self.choices:
                raise argparse.ArgumentTypeError(
                    f"must be one of {', '.join(self.choices)}{unset}. Received: {text!r}."
                )
            return self.choices[word]
        kind = get_args(self.kind)[0] if get_origin(self.kind) is tuple else self.kind
        try:
            return kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"takes {_WORDS[kind]}{unset}. Received: {text!r}.") from None

    def finished(self, value: Any) -> Any:
        """Return the field's value from what the parser has returned."""
        if get_origin(self.kind) is dict:
            return pairs(self.flag, value)
        if get_origin(self.kind) is tuple:
            return None if value == [None] else tuple(value)
        return value


_WORDS: dict[Any, str] = {int: "INT", float: "FLOAT", Path: "PATH", str: "NAME"}


def sections_of(config: Any) -> dict[str, Any]:
    """Return the sections of a configuration by name."""
    return {name: part for name, part in vars(config).items() if is_dataclass(part)}


def options_of(section: Any) -> list[Option]:
    """Return the options of a dataclass, or of an instance, whose values are then the defaults."""
    kind: Any = section if inspect.isclass(section) else type(section)
    hints, docs = get_type_hints(kind), _field_docs(kind)
    options = []
    for field in fields(kind):
        hint = hints[field.name]
        if is_dataclass(hint):  # a section of its own
            continue
        union = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
        (value,) = (part for part in union if part is not types.NoneType)
        default = getattr(section, field.name, None if field.default is MISSING else field.default)
        options.append(
            Option(
                field=field.name,
                kind=value,
                optional=len(union) > 1,
                default=default,
                help=docs.get(field.name, ""),
                rules=described(declaration_of(field).rules),
                limits=limits_of(declaration_of(field).within),
            )
        )
    return options


def _field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass and its bases."""
    docs: dict[str, str] = {}
    for base in filter(is_dataclass, reversed(kind.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in pairwise(definition.body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                docs[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(below.value)).split())
    return docs


def parse_options(argv: Sequence[str], verb: str, sections: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Parse options of dataclasses, and return the given values by section and field.

    Args:
        argv: the words after the verb.
        verb: named in errors.
        sections: dataclasses or instances of them.

    Raises:
        UserError: an option that does not exist, or a value of another type.
    """
    parser = Parser(verb, "", add_help=False)
    options = {f"{name}.{each.field}": each for name, section in sections.items() for each in options_of(section)}
    for destination, option in options.items():
        option.add_to(parser, destination.partition(".")[0])
    given: dict[str, dict[str, Any]] = {name: {} for name in sections}
    for destination, value in vars(parser.parse_args(argv)).items():
        section, _, field = destination.partition(".")
        given[section][field] = options[destination].finished(value)
    return given


# -- help --

TITLES = {
    "model": "the model, its loss and its metrics",
    "data": "samples and batches",
    "optim": "optimizer, learning rate, weight decay",
    "training": "length of the run, precision, memory",
    "exchange": "how gradients travel",
    "update": "how gradients become weights",
    "tuning": "other weights, zeros, adapters, a teacher",
    "pipeline": "layers that are shared among ranks",
    "bad_steps": "NaN, infinity and spikes of the loss",
    "desync": "ranks whose weights differ",
    "checkpoint": "what is saved",
    "observability": "what is reported",
    "runtime": "backend, threads, timeouts",
    "elastic": "ranks that are lost or come",
}
"""The groups of options, by section of the configuration."""
COMMON = ("--model", "--data", "--batch", "--epochs", "--learning-rate", "--optimizer")
"""Options that the first screen explains."""


def overview(config: Config, files: Any, name: str | None) -> str:
    """Return the first screen: paths, the options that most runs need, and the names of all others by group.

    Args:
        config: whose values are shown as defaults.
        files: the dataclass of paths.
        name: the recipe.
    """
    groups = {group: options_of(section) for group, section in sections_of(config).items()}
    known = {option.flag: option for options in groups.values() for option in options}
    lines = [
        "usage: python -m hvdtrain [train] [RECIPE] [--option value ...]",
        f"Trains the recipe {name or config.recipe}, whose values are in brackets, or goes on with a run.",
        *(_line(option, known) for option in (*options_of(files), *(known[flag] for flag in COMMON))),
        "Other options; --help GROUP explains those of a group, --help all every one:",
    ]
    for group, options in groups.items():
        names = " ".join(option.flag.removeprefix("--") for option in options if option.flag not in COMMON)
        lines += wrapped(names, f"{group:<13} ", " " * 4)
    return "\n".join(lines)


def _line(option: Option, known: Mapping[str, Option]) -> str:
    """Return an option in one line: the first sentence of its help, and its default with its arguments."""
    typed = f"{option.flag} {'NAME' if option.choices else option.value.split()[0]}"
    meaning = option.help.partition(". ")[0].rstrip(".").partition(";")[0]
    arguments = known.get(f"{option.flag}-args")
    own = f" {arguments.shown_default}" if arguments is not None and arguments.default else ""
    default = "" if option.default in (None, ()) or isinstance(option.default, dict) else f" [{option.default}{own}]"
    room = _columns() - 25 - len(default)
    if room < len(" …"):
        return f"  {typed}{default}"
    return f"  {typed:<22} {textwrap.shorten(meaning, room, placeholder=' …')}{default}"


def group_help(config: Config, group: str) -> str:
    """Return the options of a group in full; of all groups for `all`.

    Raises:
        ConfigError: there is no such group.
    """
    sections = sections_of(config)
    if group != "all" and group not in sections:
        raise ConfigError(f"There is no group of options {group!r}.{suggestion(group, {**TITLES, 'all': ''})}")
    return "\n\n".join("\n".join(_group(name, sections[name])) for name in sections if group in (name, "all"))


def _group(name: str, section: Any) -> Iterator[str]:
    yield f"{name}: {TITLES[name]}"
    for option in options_of(section):
        yield f"  {option.flag} {option.value}"
        text = f"{option.help} (default: {option.shown_default}) {on_command_line(option.rules)}"
        yield from wrapped(text, " " * 6, " " * 6)


def wrapped(text: str, first: str = "", later: str = "  ") -> list[str]:
    """Return a text in lines that fit the terminal; no flag is broken at its hyphens."""
    return textwrap.wrap(text, _columns(), initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, 100)
