"""Contracts between `hvdtrain.compat` and the libraries: what each of its functions takes for granted."""

from collections.abc import Callable
from importlib.metadata import version
from types import ModuleType
from typing import Any

import pytest

Check = Callable[[], None]


class Contracts:
    """The contracts of one file of `hvdtrain.compat`: a check of each of its functions."""

    def __init__(self, module: ModuleType, library: str) -> None:
        self.module = module
        self.library = library
        self.known: dict[str, Check] = {}

    def of(self, *functions: Any) -> Callable[[Check], Check]:
        """Register a check as the contract of `functions`."""

        def register(check: Check) -> Check:
            self.known.update((function.__name__, check) for function in functions)
            return check

        return register

    def tests(self) -> tuple[Callable[..., None], Callable[..., None]]:
        """Return the tests of a file: each contract holds, and no function is without one."""

        @pytest.mark.parametrize("name", self.known)
        def test_contract(name: str) -> None:
            try:
                self.known[name]()
            except Exception as error:
                where = f"{self.module.__name__}.{name}"
                raise AssertionError(f"{where} does not hold with {self.library} {version(self.library)}") from error

        def test_every_function_has_a_contract() -> None:
            things = ((name, thing) for name, thing in vars(self.module).items() if not name.startswith("_"))
            own = {name for name, thing in things if getattr(thing, "__module__", "") == self.module.__name__}
            assert {name for name in own if callable(vars(self.module)[name])} == set(self.known)

        return test_contract, test_every_function_has_a_contract
