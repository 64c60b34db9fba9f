"""The code blocks and commands of README.md and docs/, as they are printed."""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))

_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_FILE_NAME = re.compile(r"# ([\w/]+\.\w+)\n")


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    """Line of the page on which its text begins."""
    language: str
    text: str
    not_run: str
    """The reason given in a comment `<!-- not run: … -->` above it; empty if it is run."""

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def file(self) -> str:
        """Name of the file that it shows, from a first line such as `# mypkg/mymodel.py`; else empty."""
        found = _FILE_NAME.match(self.text)
        return found[1] if found else ""

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block, without their comments."""
        lines = [re.sub(r"\s+#.*", "", line).strip() for line in self.text.splitlines()]
        return [line for line in lines if line and not line.startswith("#")]


def text_of(page: str) -> str:
    """Return a page's text; `page` is its path from the root of the repository."""
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def blocks_of(page: str, *languages: str) -> tuple[Block, ...]:
    """Return a page's blocks in these languages (python and bash by default), from top to bottom."""
    text = text_of(page)
    found = []
    for match in _BLOCK.finditer(text):
        if match["language"] in (languages or ("python", "bash")):
            line = text.count("\n", 0, match.start("text")) + 1
            found.append(Block(page, line, match["language"], match["text"], match["reason"] or ""))
    return tuple(found)
