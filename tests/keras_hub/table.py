"""The table of KerasHub's decoders in docs/keras_support.md. `python -m tests.keras_hub.table` writes it."""

from collections.abc import Iterator
from pathlib import Path

from tests.keras_hub.decoders import BACKBONES, NOT_COMPARED, REFUSED

PAGE = Path(__file__).parents[2] / "docs" / "keras_support.md"
BEGIN, END = "<!-- written by tests/keras_hub/table.py -->\n", "<!-- end of KerasHub's decoders -->\n"
LABELS = {"GemmaOneKeyHead": "Gemma, one head of keys"}
AXES = {"tp=2": "`tp=2`", "pp=2": "`pp=2`", "zero=3": "`zero=3`"}


def lines() -> Iterator[str]:
    """Yield a row for each family."""
    yield f"| family | {' | '.join(AXES.values())} |"
    yield "|---|" + "---|" * len(AXES)
    for name in BACKBONES:
        cells = [f"refused: {REFUSED[name, axes][0]}" if (name, axes) in REFUSED else "equal" for axes in AXES]
        yield f"| {LABELS.get(name, name)} | {' | '.join(cells)} |"
    for names, why in NOT_COMPARED.items():
        yield f"| {names} | not compared: {why} |" + " |" * (len(AXES) - 1)


def written(page: str) -> str:
    """Return the page with the table of now."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + "\n".join(lines()) + "\n\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
