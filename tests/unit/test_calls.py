"""Arguments go by name where their order could be mistaken."""

from pathlib import Path

import pytest

import hvdtrain
from tests.own_calls import Sources

ROOT = Path(hvdtrain.__file__).parent.parent
MOST_POSITIONAL = 4


def test_calls_of_hvdtrains_own_functions_pass_few_arguments_by_position():
    """Exceptions are calls by a star, of which nothing is known."""
    calls = list(Sources(ROOT, ["hvdtrain"]).calls())
    assert len(calls) > 3000, "the search finds nothing"
    assert [str(call) for call in calls if not call.starred and call.positional > MOST_POSITIONAL] == []


SOURCE = """
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from hvdtrain.other import there as here


@dataclass
class Fields:
    a: int
    b: int
    _: KW_ONLY
    c: int = 0


class More(Fields):
    def method(self, x, y): ...

    def other(self):
        self.method(1, 2)
        self.unknown(1, 2)


class Row(NamedTuple):
    a: int
    b: int


class Made:
    def __init__(self, a, *, b): ...


def plain(a, b): ...


def many(*all): ...


def use(given):
    Fields(1, 2)
    Row(1, 2)
    Made(1, b=2)
    plain(1, 2)
    here(1)
    many(1, 2, 3, 4, 5)
    given(1, 2, 3, 4, 5)
    given.plain(1, 2, 3, 4, 5)
"""


def test_the_search_knows_what_is_called(tmp_path):
    (tmp_path / "hvdtrain").mkdir()
    (tmp_path / "hvdtrain" / "one.py").write_text(SOURCE)
    (tmp_path / "hvdtrain" / "other.py").write_text("def there(somewhere): ...\n")
    found = {str(call).rpartition(" ")[2]: call.parameters for call in Sources(tmp_path, ["hvdtrain"]).calls()}
    assert found == {
        "self.method": ("x", "y"),
        "Fields": ("a", "b"),
        "Row": ("a", "b"),
        "Made": ("a",),
        "plain": ("a", "b"),
        "here": ("somewhere",),
    }


@pytest.mark.parametrize(("source", "found"), [("f(1, 2, 3, 4)", 0), ("f(1, 2, 3, 4, 5)", 1), ("f(*x)", 0)])
def test_a_call_by_position_is_found(source, found, tmp_path):
    (tmp_path / "hvdtrain").mkdir()
    (tmp_path / "hvdtrain" / "one.py").write_text(f"def f(a, b, c, d, e): ...\n\n\nx = []\n{source}\n")
    calls = Sources(tmp_path, ["hvdtrain"]).calls()
    assert sum(not call.starred and call.positional > MOST_POSITIONAL for call in calls) == found
