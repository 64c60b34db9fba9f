"""The help of `train`: one screen of groups, and the options of one group."""

import shutil
import textwrap
from typing import Any

from hvdtrain.cli.options import Option, options_of, sections_of
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import suggestion
from hvdtrain.config.run import Config

TITLES = {
    "model": "the model, its loss and its metrics",
    "data": "samples and batches",
    "optim": "optimizer, learning rate, weight decay",
    "training": "length of the run, precision, memory",
    "exchange": "how gradients travel",
    "update": "how gradients become weights",
    "pipeline": "layers that are shared among ranks",
    "bad_steps": "NaN, infinity and spikes of the loss",
    "desync": "ranks whose weights differ",
    "checkpoint": "what is saved",
    "observability": "what is reported",
    "runtime": "backend, threads, timeouts",
    "elastic": "ranks that are lost or come",
}
"""The groups of options, by section of the configuration."""
COMMON = (
    *("--model", "--data", "--data-args", "--batch", "--epochs", "--learning-rate", "--optimizer"),
    *("--accumulate", "--precision"),
)
"""Options that the first screen explains."""
EVERYTHING = "all"
MOST_COLUMNS = 100


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
        *(_line(option) for option in options_of(files)),
        *(_line(known[flag]) for flag in COMMON),
        "All options; --help GROUP explains those of a group, --help all every one:",
    ]
    for group, options in groups.items():
        names = " ".join(option.flag.removeprefix("--") for option in options)
        lines += wrapped(names, f"  {group:<13} ", " " * 6)
    return "\n".join(lines)


def group_help(config: Config, group: str) -> str:
    """Return the options of a group in full, or of all of them.

    Raises:
        ConfigError: there is no such group.
    """
    sections = sections_of(config)
    if group != EVERYTHING and group not in sections:
        known = {**dict.fromkeys(sections, ""), EVERYTHING: ""}
        raise ConfigError(f"There is no group of options {group!r}.{suggestion(group, known)}")
    chosen = sections if group == EVERYTHING else {group: sections[group]}
    return "\n\n".join(_group(name, section) for name, section in chosen.items())


def _group(name: str, section: Any) -> str:
    blocks = [f"{name}: {TITLES.get(name, '')}".rstrip(": ")]
    for option in options_of(section):
        blocks.append(f"  {option.flag} {option.value}")
        text = f"{option.help} (default: {_shown(option.default)})"
        blocks += wrapped(text, " " * 6, " " * 6)
    return "\n".join(blocks)


def wrapped(text: str, first: str = "", later: str = "  ") -> list[str]:
    """Return a text in lines that fit the terminal; no flag is broken at its hyphens."""
    return textwrap.wrap(text, _columns(), initial_indent=first, subsequent_indent=later, break_on_hyphens=False)


def _line(option: Option) -> str:
    """Return an option in one line: the first sentence of its help, and its default."""
    typed = f"{option.flag} {'NAME' if option.choices else option.value.split()[0]}"
    meaning = option.help.partition(". ")[0].rstrip(".").partition(";")[0]
    default = "" if option.default in (None, ()) or isinstance(option.default, dict) else f" [{option.default}]"
    return f"  {typed:<22} {textwrap.shorten(meaning, _columns() - 25 - len(default), placeholder=' …')}{default}"


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name} {each}" for name, each in value.items()) or "none"
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return str(value)


def _columns() -> int:
    return min(shutil.get_terminal_size().columns, MOST_COLUMNS)
