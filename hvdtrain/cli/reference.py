"""Write the lists of docs/options.md from the declarations: `python -m hvdtrain.cli.reference docs/options.md`."""

import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from hvdtrain.cli.parser import options_of, sections_of
from hvdtrain.config.errors import on_command_line
from hvdtrain.config.facts import Facts, described
from hvdtrain.config.options import declaration_of
from hvdtrain.config.run import Config

_REGION = re.compile(r"(<!-- options: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
_FLAG = re.compile(r"(?<![\w`-])--[a-z][a-z-]*[a-z]")
_ENCODED = re.compile("\x02[^\x03]*\x03")


def with_options(page: str) -> str:
    """Return `page` with the options of a section, or the rules of `facts`, between each pair of its markers."""
    return _REGION.sub(lambda found: f"{found[1]}{_listed(found[2])}{found[3]}", page)


def _listed(section: str) -> str:
    items = _facts() if section == "facts" else _options(section)
    lines = [
        textwrap.fill(_marked(item), 120, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False)
        for item in items
    ]
    return "".join(f"{line}\n" for line in lines)


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


def _marked(text: str) -> str:
    """Put options into backticks."""
    return _FLAG.sub(r"`\g<0>`", _ENCODED.sub(lambda found: f"`{on_command_line(found[0])}`", text))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(with_options(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
