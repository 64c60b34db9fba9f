"""Leave cases of a parametrized test to `launch/test.sh --all`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def mostly_extended(cases: Iterable[Any], everyday: Callable[..., bool], *, why: str) -> list[Any]:
    """Mark the cases as extended for which `everyday` is false; `why` tells what the everyday ones show of them."""
    assert why
    marked = []
    for case in cases:
        values = case if isinstance(case, tuple) else (case,)
        marked.append(case if everyday(*values) else pytest.param(*values, marks=pytest.mark.extended))
    assert 0 < sum(isinstance(case, type(pytest.param())) for case in marked) < len(marked)
    return marked
