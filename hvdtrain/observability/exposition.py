"""Prometheus' text format, version 0.0.4.

Written here since it takes a page: monitoring then needs no package that a cluster's Python may lack. The tests read
what it writes with Prometheus' own parser.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PREFIX = "hvdtrain"


@dataclass(frozen=True)
class Family:
    """A figure under one name, with a value for each set of labels."""

    name: str
    """Without prefix and, for a counter, without ``_total``."""
    told: str
    """What it is, in a sentence."""
    samples: Sequence[tuple[Mapping[str, str], Any]]
    """Labels and value; values that are None are left out."""
    counter: bool = False
    """Whether it only ever grows within a run; else it is a gauge."""


def exposition(families: Iterable[Family]) -> str:
    """Return the text for `families`."""
    return "".join(line + "\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterable[str]:
    name = f"{PREFIX}_{family.name}" + ("_total" if family.counter else "")
    yield f"# HELP {name} {_escaped(family.told)}"
    yield f"# TYPE {name} {'counter' if family.counter else 'gauge'}"
    for labels, value in family.samples:
        if value is not None:
            yield f"{name}{_labels(labels)} {_number(float(value))}"


def _labels(labels: Mapping[str, str]) -> str:
    pairs = ",".join(f'{name}="{_escaped(value, quotes=True)}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str, *, quotes: bool = False) -> str:
    plain = text.replace("\\", "\\\\").replace("\n", "\\n")
    return plain.replace('"', '\\"') if quotes else plain


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return repr(value) if math.isfinite(value) else ("+Inf" if value > 0 else "-Inf")
