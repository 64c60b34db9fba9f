"""Contracts between `hvdtrain.compat` and the libraries: what each of its functions takes for granted."""

from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import ModuleType
from typing import Any, NamedTuple

import pytest

Check = Callable[[], None]


class Contract(NamedTuple):
    """What a function takes for granted, as a check, and what a library may change."""

    check: Check
    breaks: Sequence[tuple[Any, str]]
    """Attributes without which the check fails: of a class or a module."""


class Contracts:
    """The contracts of one file of `hvdtrain.compat`."""

    def __init__(self, module: ModuleType, library: str) -> None:
        self.module = module
        self.library = library
        self.known: dict[str, Contract] = {}

    def of(self, function: Any, *breaks: tuple[Any, str]) -> Callable[[Check], Check]:
        """Register a check as the contract of `function`."""

        def register(check: Check) -> Check:
            self.known[function.__name__] = Contract(check, breaks)
            return check

        return register

    def hold(self, name: str) -> None:
        """Check one contract; what fails names the function and the library's version."""
        try:
            self.known[name].check()
        except Exception as error:
            where = f"{self.module.__name__}.{name}"
            raise AssertionError(f"{where} does not hold with {self.library} {version(self.library)}") from error

    def breaks(self, name: str, monkeypatch: pytest.MonkeyPatch, library: Any, attribute: str) -> None:
        """Check that the contract fails, and how, once an attribute of the library is gone."""
        owners = (each for each in getattr(library, "__mro__", [library]) if attribute in vars(each))
        monkeypatch.delattr(next(owners), attribute)
        pattern = rf"{self.module.__name__}\.{name} does not hold with {self.library} \d"
        with pytest.raises(AssertionError, match=pattern):
            self.hold(name)

    def functions(self) -> set[str]:
        """Return the names of what the file defines for others."""
        own = (name for name, thing in vars(self.module).items() if callable(thing) and not name.startswith("_"))
        return {name for name in own if getattr(vars(self.module)[name], "__module__", "") == self.module.__name__}

    def all_breaks(self) -> list[Any]:
        """Return each pair of a contract and something that breaks it, as parameters of a test."""
        pairs = [(name, library, attribute) for name, each in self.known.items() for library, attribute in each.breaks]
        return [pytest.param(*pair, id=f"{pair[0]}-{pair[2]}") for pair in pairs]
