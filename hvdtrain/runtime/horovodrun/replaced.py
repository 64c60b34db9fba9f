"""Other functions in the place of a module's own, for a while."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(module: Any, **others: Any) -> Iterator[None]:
    """Give `module` the attributes in `others` inside this context."""
    before = {name: getattr(module, name) for name in others}
    for name, value in others.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
