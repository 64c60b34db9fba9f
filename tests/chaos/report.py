"""Tables of rounds."""

from collections.abc import Mapping, Sequence
from statistics import median

Record = Mapping[str, object]


def table(records: Sequence[Record]) -> str:
    """Return a table in Markdown with a row for each fault and world, and one for all of them."""
    lines = [
        "| fault | world | rounds | as it has to be | seconds to the message | seconds to the end | steps lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for key in dict.fromkeys(sorted((str(each["fault"]), str(each["world"])) for each in records)):
        lines.append(_row(key, [each for each in records if (each["fault"], each["world"]) == key]))
    return "\n".join([*lines, _row(("all", ""), records)])


def _row(key: tuple[str, str], records: Sequence[Record]) -> str:
    good = sum(not each["problems"] for each in records)
    figures = [_figures(records, name) for name in ("detected_s", "ended_s", "lost")]
    return f"| {' | '.join([*key, str(len(records)), str(good), *figures])} |"


def _figures(records: Sequence[Record], name: str) -> str:
    """Return "1.2 (3.4)": the median, and the largest."""
    values = [float(str(each[name])) for each in records if each[name] is not None]
    return f"{median(values):.3g} ({max(values):.3g})" if values else "-"
