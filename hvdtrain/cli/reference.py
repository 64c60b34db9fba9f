"""Write the lists of docs/options.md from the declarations: `python -m hvdtrain.cli.reference docs/options.md`."""

import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hvdtrain.cli.parser import options_of, sections_of
from hvdtrain.config.errors import on_command_line
from hvdtrain.config.facts import Facts, described
from hvdtrain.config.options import declaration_of
from hvdtrain.config.registry import resolve
from hvdtrain.config.run import Config
from hvdtrain.data.registry import SOURCES
from hvdtrain.models.registry import MODELS

_REGION = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z-]*[a-z]")
_ENCODED = re.compile("\x02[^\x03]*\x03")


def with_options(page: str) -> str:
    """Return `page` with the lists that its markers name: options of a section, `facts`, `sources` or `families`."""
    return _REGION.sub(lambda found: f"{found[1]}{_listed(found[2])}{found[3]}", page)


def _listed(section: str) -> str:
    lists = {"facts": _facts, "sources": _sources, "families": _families}
    lines = [_wrapped(_marked(item)) for item in (lists[section]() if section in lists else _options(section))]
    return "".join(f"{line}\n" for line in lines)


def _wrapped(item: str) -> str:
    indent = " " * (item.index("-") + 2)
    return textwrap.fill(item, 120, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)


def _options(section: str) -> Iterator[str]:
    for option in options_of(sections_of(Config(""))[section]):
        typed = option.flag if option.kind is bool else f"{option.flag} {option.value}"
        limits = f", {option.limits}" if option.limits else ""
        yield f"- `{typed}` ({option.shown_default}{limits}): {option.help} {option.rules}".rstrip()


def _facts() -> Iterator[str]:
    for each in fields(Facts):
        declared = declaration_of(each)
        if declared.rules and declared.title:  # without one, it is an option
            yield f"- {declared.title}: {described(declared.rules)}"


def _sources() -> Iterator[str]:
    for name in SOURCES:
        yield from _arguments(name, resolve("dataset", name, SOURCES))


def _families() -> Iterator[str]:
    for name in MODELS:
        yield from _arguments(name, resolve("model", name, MODELS).build)


def _arguments(name: str, function: Callable[..., Any]) -> Iterator[str]:
    """Yield what the keyword arguments of `function` are, by its docstring."""
    text = inspect.getdoc(function) or ""
    block = text.partition("Args:\n")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", block, re.MULTILINE))
    given = [each for each in inspect.signature(function).parameters.values() if each.kind is each.KEYWORD_ONLY]
    yield f"- `{name}`{':' if given else ' takes none.'}"
    for each in given:
        default = "" if each.default == "" else f" ({each.default})"
        yield f"  - `{each.name}`{default}: {' '.join(told[each.name].split())}"


def _marked(text: str) -> str:
    """Put options into backticks."""
    return _FLAG.sub(r"`\g<0>`", _ENCODED.sub(lambda found: f"`{on_command_line(found[0])}`", text))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_options(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
