"""Declare options with their range and what they need, exclude and apply to; check them against facts.

An option is a field of a dataclass made by `@section`, whose default is `option(default, range, *rules)`. A rule names
other options or facts of a job by conditions: `"local_steps"` holds if that option is set, not at its default,
`"zero=2|3"` if it has one of these values.
"""

import functools
import numbers
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, dataclass_transform, get_args, get_origin, get_type_hints

from hvdtrain.config.errors import OptionError, opt

T = TypeVar("T")
Kind = Literal["needs", "applies_to", "excludes"]


@dataclass(frozen=True)
class Condition:
    """An option or fact that is set, or has one of `values`."""

    name: str
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Parse `name` or `name=value|value`."""
        name, _, values = text.partition("=")
        return cls(name, tuple(values.split("|")) if values else ())


@dataclass(frozen=True)
class Rule:
    """A combination of options and facts that is refused, or with `note` reported."""

    kind: Kind
    others: tuple[Condition, ...]
    when: tuple[str, ...]
    """Values of the option that the rule is about; empty: all but its default."""
    why: str
    """Reason, as a clause."""
    instead: str
    """Advice, as a clause."""
    holds: Callable[[Any, Any], bool] | None
    """Whether the values of the option and of the other one make the condition hold, in place of `Condition.values`."""
    note: bool


def needs(*others: str, when: str = "", instead: str = "add it") -> Rule:
    """Declare that the option does not work without one of `others`."""
    return _rule("needs", others, when, instead=instead)


def applies_to(*others: str, when: str = "", instead: str = "leave it out", note: bool = False) -> Rule:
    """Declare that the option has no effect without one of `others`."""
    return _rule("applies_to", others, when, instead=instead, note=note)


def excludes(
    *others: str, when: str = "", why: str = "", instead: str = "", holds: Callable[[Any, Any], bool] | None = None
) -> Rule:
    """Declare that the option goes with none of `others`."""
    return _rule("excludes", others, when, why=why, instead=instead, holds=holds)


def _rule(kind: Kind, others: tuple[str, ...], when: str, **more: Any) -> Rule:
    values = tuple(when.split("|")) if when else ()
    return Rule(kind, tuple(map(Condition.parse, others)), values, **{"why": "", "holds": None, "note": False, **more})


@dataclass(frozen=True)
class Declaration:
    """Metadata of an option's field, or of a fact's."""

    within: str
    """Interval of valid numbers, such as `[1, inf)` or `0, [5, inf)`; empty: any."""
    rules: tuple[Rule, ...]
    valid: Callable[[Any], object] | None
    """Raises ConfigError for an invalid value."""
    argument: bool = True
    """Whether the option is also an argument of a Python function; else a flag alone."""
    title: str = ""
    """Name of a fact in rules and documentation; empty for an option."""
    shown: str = ""
    """Format of a fact's value in messages."""


def option(
    default: Any, *rules: Rule | str, valid: Callable[[Any], object] | None = None, argument: bool = True
) -> Any:
    """Return the field of an option with this default, its interval (as text) and its rules."""
    within = "".join(rule for rule in rules if isinstance(rule, str))
    declared = tuple(rule for rule in rules if isinstance(rule, Rule))
    metadata = {"declaration": Declaration(within, declared, valid, argument)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


def flag(default: Any, *rules: Rule | str, valid: Callable[[Any], object] | None = None) -> Any:
    """Return the field of an option that only the command line and files have."""
    return option(default, *rules, valid=valid, argument=False)


def declaration_of(each: Any) -> Declaration:
    """Return the declaration of a dataclass field."""
    return each.metadata.get("declaration") or Declaration("", (), None)


@dataclass_transform(frozen_default=True)
def section(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass of options that are checked when it is made; files may have no other keys."""
    if not hasattr(cls, "__post_init__"):
        cls.__post_init__ = validate  # type: ignore[attr-defined]
    cls.__pydantic_config__ = {"extra": "forbid"}  # type: ignore[attr-defined]
    return dataclass(frozen=True)(cls)


def validate(options: Any) -> None:
    """Check each value of a section by itself, then its combinations. Raises OptionError."""
    cls: Any = type(options)
    for each in fields(options):
        _validate_value(each, getattr(options, each.name), kinds_of(cls)[each.name])
    check(options)


def _validate_value(each: Any, value: Any, kinds: tuple[Any, ...]) -> None:
    if value is None and types.NoneType in kinds:
        return
    name, declared = each.name, declaration_of(each)
    choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if choices and value not in choices:
        problem = f"must be one of {', '.join(map(str, choices))}"
        raise OptionError.of(name, value, problem, argument=declared.argument)
    if declared.within:
        kind = int if int in kinds or tuple[int, ...] in kinds else float
        numbers_given = value if isinstance(value, tuple) else (value,)
        if not all(_lies_within(number, declared.within, kind) for number in numbers_given):
            raise OptionError.of(name, value, f"must be {limits_of(declared.within)}", argument=declared.argument)
    if declared.valid is not None:
        declared.valid(value)


@functools.cache
def kinds_of(cls: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the alternatives of each field's type."""
    unions = (Union, types.UnionType)
    return {
        name: get_args(hint) if get_origin(hint) in unions else (hint,) for name, hint in get_type_hints(cls).items()
    }


_INTERVAL = re.compile(r"(?:(\S+) or )?([\[(])(\S+), (\S+)([\])])")


def _lies_within(value: Any, interval: str, kind: type) -> bool:
    single, opening, low, high, closing = _parts(interval)
    if not isinstance(value, numbers.Integral if kind is int else numbers.Real):
        return False
    number = float(value)
    if single is not None and number == float(single):
        return True
    above = number >= float(low) if opening == "[" else number > float(low)
    return above and (number <= float(high) if closing == "]" else number < float(high))


def limits_of(interval: str) -> str:
    """Return an interval in words, such as "at least 1"; "" for none."""
    if not interval:
        return ""
    single, opening, low, high, closing = _parts(interval)
    if high != "inf":
        words = f"in {opening}{low}, {high}{closing}"
    else:
        words = f"at least {low}" if opening == "[" else f"above {low}"
    return words if single is None else f"{single}, or {words}"


def _parts(interval: str) -> Any:
    found = _INTERVAL.fullmatch(interval)
    assert found is not None, interval
    return found.groups()


# -- combinations --


def check(*options: Any, facts: Any = None) -> None:
    """Refuse combinations of options with one another and with known facts.

    Args:
        options: sections, or a dataclass of sections; a rule about others that are not among them is left out.
        facts: `Facts` as far as they are known.

    Raises:
        OptionError: naming an option, its value, what it does not go with, and what to use instead.
    """
    error = next((error for rule, _, error in violations(*options, facts=facts) if not rule.note), None)
    if error is not None:
        raise error


def violations(*options: Any, facts: Any = None) -> Iterator[tuple[Rule, str, OptionError]]:
    """Yield each violated rule, the titles of its conditions, and the error; same arguments as `check`."""
    return _Known(options, facts).violations()


def notes(*options: Any, facts: Any = None) -> list[str]:
    """Return notes on options without effect; same arguments as `check`."""
    idle: dict[str, list[str]] = {}
    known = _Known(options, facts)
    for rule, title, error in known.violations():
        if rule.note:
            idle.setdefault(title, []).append(known.called(error.option))
    return [
        f"note: without {title} {', '.join(names)} {'has' if len(names) == 1 else 'have'} no effect."
        for title, names in idle.items()
    ]


class _Known:
    """Values of options and facts by name, with their declarations."""

    def __init__(self, options: Iterable[Any], facts: Any) -> None:
        self._fields: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        for each in options:
            self._add(each)
        for each in fields(facts) if facts is not None else ():
            value = getattr(facts, each.name)
            if value is not None:
                self._fields.setdefault(each.name, each)
                self._values[each.name] = value

    def _add(self, options: Any) -> None:
        for each in fields(options):
            value = getattr(options, each.name)
            if is_dataclass(value):
                self._add(value)
            else:
                self._fields[each.name], self._values[each.name] = each, value

    def violations(self) -> Iterator[tuple[Rule, str, OptionError]]:
        """Yield violated rules, the others' titles, and the error."""
        for name, each in self._fields.items():
            value = self._values[name]
            for rule in declaration_of(each).rules:
                if str(value) not in rule.when if rule.when else not self._is_set(name):
                    continue
                held = [self._holds(rule, value, other) for other in rule.others]
                titles = " or ".join(self._title(other) for other in rule.others)
                if rule.kind == "excludes":
                    for other, holds in zip(rule.others, held, strict=True):
                        if holds:
                            yield rule, titles, self._conflict(name, rule, other.name)
                elif not any(held) and None not in held:
                    yield rule, titles, self._missing(name, rule, titles)

    def _is_set(self, name: str) -> bool:
        value, each = self._values[name], self._fields[name]
        if declaration_of(each).title:
            return value is True or (bool(value) and value != 1)
        return bool(value != (each.default if each.default is not MISSING else {}))

    def _holds(self, rule: Rule, value: Any, other: Condition) -> bool | None:
        if other.name not in self._values:
            return None
        theirs = self._values[other.name]
        if rule.holds is not None:
            return rule.holds(value, theirs)
        return str(theirs) in other.values if other.values else self._is_set(other.name)

    def _conflict(self, name: str, rule: Rule, other: str) -> OptionError:
        both = self._is_option(other) or not self._is_option(name)
        advice = rule.instead or ("leave out one of them" if both else f"leave out {self.called(name)}")
        problem = f"does not go with {self._shown(other)}"
        return self._error(name, f"{problem}: {rule.why}" if rule.why else problem, advice, sentence=bool(rule.why))

    def _missing(self, name: str, rule: Rule, titles: str) -> OptionError:
        problem = f"needs {titles}" if rule.kind == "needs" else f"has no effect without {titles}"
        asked = next((other.name for other in rule.others if other.values), None)
        received = "" if asked is None else f" Received: {self._shown(asked)}."
        return self._error(name, problem, rule.instead, received=received)

    def _error(self, name: str, problem: str, advice: str, **more: Any) -> OptionError:
        shown = self._shown(name)
        subject = f"{shown}," if ", which" in shown else shown
        return OptionError.of(name, self._values[name], problem, advice, shown=subject, **more)

    def _is_option(self, name: str) -> bool:
        return not declaration_of(self._fields[name]).title

    def _shown(self, name: str) -> str:
        value, declared = self._values[name], declaration_of(self._fields[name])
        if declared.shown:
            return declared.shown.format(value)
        return self.called(name, None if isinstance(value, bool | tuple | dict) else value)

    def called(self, name: str, value: object = None) -> str:
        """Return the option as `opt` encodes it."""
        return opt(name, value, argument=declaration_of(self._fields[name]).argument)

    def _title(self, other: Condition) -> str:
        each = self._fields.get(other.name)
        return title_of(other, declaration_of(each)) if each is not None else ""


def title_of(condition: Condition, declared: Declaration) -> str:
    """Return what a condition is called in messages and documentation."""
    values = condition.values or (None,)
    return declared.title or " or ".join(opt(condition.name, each, argument=declared.argument) for each in values)
