"""Reports as blocks, rendered to Markdown or to a self-contained HTML page. No TensorFlow."""

import base64
import html
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Heading:
    """A heading; level 1 is the title of the report."""

    text: str
    level: int = 2


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of text."""

    text: str


@dataclass(frozen=True)
class Table:
    """A table; all but the first `texts` columns hold numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    texts: int = 1


@dataclass(frozen=True)
class Code:
    """Commands to type."""

    text: str


@dataclass(frozen=True)
class Figure:
    """A PNG figure; Markdown shows only its caption."""

    png: bytes
    caption: str


Block = Heading | Paragraph | Table | Code | Figure

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1100px; margin: 2em auto; padding: 0 1em; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; padding-bottom: .2em; }
table { border-collapse: collapse; margin: 1em 0; font-size: 13px; display: block; overflow-x: auto; }
th, td { border-bottom: 1px solid #e3e3e3; padding: .3em .7em; text-align: right; white-space: nowrap; }
th.text, td.text { text-align: left; } td.text { white-space: normal; }
tr:hover td { background: #f6f8fa; }
pre { background: #f6f8fa; padding: .8em; overflow-x: auto; font-size: 12px; }
figure { margin: 1.5em 0; } img { max-width: 100%; } figcaption { color: #666; font-size: 13px; }
"""


def to_markdown(blocks: Iterable[Block]) -> str:
    """Render the blocks as Markdown."""
    return "\n\n".join(_markdown(block) for block in blocks) + "\n"


def _markdown(block: Block) -> str:
    match block:
        case Heading():
            return f"{'#' * block.level} {block.text}"
        case Paragraph():
            return block.text
        case Code():
            return "\n".join("    " + line for line in block.text.splitlines())
        case Figure():
            return f"*Figure in report.html: {block.caption}*"
        case Table():
            marks = ["---" if number < block.texts else "---:" for number in range(len(block.columns))]
            rows = [block.columns, marks, *block.rows]
            return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def to_html(blocks: Sequence[Block], title: str) -> str:
    """Render the blocks as one HTML page, figures included."""
    body = "\n".join(_html(block) for block in blocks)
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{STYLE}</style>'
    return f"<!doctype html>\n<html lang=en><head>{head}</head><body>\n{body}\n</body></html>\n"


def _html(block: Block) -> str:
    match block:
        case Heading():
            return f"<h{block.level}>{html.escape(block.text)}</h{block.level}>"
        case Paragraph():
            return f"<p>{html.escape(block.text)}</p>"
        case Code():
            return f"<pre>{html.escape(block.text)}</pre>"
        case Figure():
            data, caption = base64.b64encode(block.png).decode(), html.escape(block.caption)
            picture = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
            return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>"
        case Table():
            rows = [_row(block.columns, "th", block.texts), *(_row(row, "td", block.texts) for row in block.rows)]
            return "<table>\n" + "\n".join(rows) + "\n</table>"


def _row(cells: Sequence[str], tag: str, texts: int) -> str:
    marks = [' class="text"' if number < texts else "" for number in range(len(cells))]
    inner = "".join(f"<{tag}{mark}>{html.escape(cell)}</{tag}>" for cell, mark in zip(cells, marks, strict=True))
    return f"<tr>{inner}</tr>"
