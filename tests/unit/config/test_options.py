"""Every declaration of an option: its values, its rules, help and documentation."""

import dataclasses
import os
import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest

import hvdtrain
from hvdtrain.cli.reference import with_options
from hvdtrain.config.errors import ConfigError, OptionError, on_command_line
from hvdtrain.config.facts import Facts
from hvdtrain.config.options import (
    applies_to,
    check,
    declaration_of,
    excludes,
    kinds_of,
    limits_of,
    needs,
    option,
    section,
    violations,
)
from hvdtrain.config.run import Config, option_fields

SECTIONS = {
    name: type(part) for part in vars(Config("")).values() if dataclasses.is_dataclass(part) for name in vars(part)
}
FACTS = {each.name: each for each in dataclasses.fields(Facts)}
DECLARED = {**option_fields(), **{name: each for name, each in FACTS.items() if name not in option_fields()}}
RULES = [
    pytest.param(name, rule, id=f"{name} {rule.kind} {' '.join(other.name for other in rule.others)}")
    for name, each in DECLARED.items()
    for rule in declaration_of(each).rules
]
TEXTS = Path(__file__).with_name("refusals.txt")
LIMITED = {name: each for name, each in option_fields().items() if declaration_of(each).within}
SET: dict[str, Any] = {
    "parallel": "tp=2",
    "timeline": "t.json",
    "profile": "1:2",
    "decay_at": (0.5,),
    "profile_ranks": (1,),
    "augment": ("flip",),
    "on_bad_record": "skip:1",
    "pipeline_stages": ("a",),
    "keep_best_mode": "max",
    "metrics_host": "0.0.0.0",
    "predivide": 2.0,
    "clip_norm": 1.0,
    "final_rate": 0.5,
    "decay_factor": 0.5,
    "servers": 6,
    "server_variables": ("embedding",),
}
"""Valid values other than the default, where none follows from the type."""
HOLDING = {"size": 6, "parallel": "tp=2", "local_steps": 3}
"""Values for which the predicates of rules hold."""


def value_for(name, values=()):
    """One of `values`, or a value at which the option or fact is set."""
    kinds = kinds_of(SECTIONS.get(name, Facts))[name]
    (kind,) = (each for each in kinds if each is not type(None))
    if values:
        return next((each for each in get_args(kind) if str(each) in values), values[0])
    if name in SET:
        return SET[name]
    if get_origin(kind) is not None:
        return next(each for each in get_args(kind) if each != DECLARED[name].default)
    return {bool: True, int: 3, float: 3.0, str: "some", dict: {"a": 1}}[kind]


def section_with(values):
    """Sections that hold `values`, unchecked, and the facts among them."""
    parts: dict[Any, Any] = {}
    for name, value in values.items():
        if name in SECTIONS and not (name == "backend" and name in parts):
            part = parts.setdefault(SECTIONS[name], SECTIONS[name]())
            object.__setattr__(part, name, value)
    return list(parts.values()), Facts(**{name: value for name, value in values.items() if name not in SECTIONS})


def violated(values):
    sections, facts = section_with(values)
    return {id(rule): error for rule, _, error in violations(*sections, facts=facts)}


@pytest.mark.parametrize(("name", "rule"), RULES)
def test_every_rule_refuses_and_lets_pass(name, rule):
    mine, refused = value_for(name, rule.when), rule.kind == "excludes"
    absent = {name: mine, **{other.name: absent_value(other.name, other.values) for other in rule.others}}
    assert (id(rule) in violated(absent)) is not refused
    for other in rule.others:
        holding = value_for(other.name, other.values) if rule.holds is None else HOLDING[other.name]
        found = violated({**absent, other.name: holding})
        assert (id(rule) in found) is refused
        assert id(rule) not in violated({**absent, name: absent_value(name), other.name: holding})
    error = (found if refused else violated(absent))[id(rule)]
    assert (error.option, error.value) == (name, mine)
    assert error.advice[1:] in error.message
    assert rule.why in error.message


def refusal_by(name, rule):
    """The refusal by a rule of an option or fact, as the command line words it."""
    absent = {
        name: value_for(name, rule.when),
        **{each.name: absent_value(each.name, each.values) for each in rule.others},
    }
    if rule.kind == "excludes":
        other = rule.others[0]
        absent[other.name] = value_for(other.name, other.values) if rule.holds is None else HOLDING[other.name]
    return on_command_line(violated(absent)[id(rule)].message)


def test_the_text_of_every_refusal_is_known():
    """They are made of several parts, and read as one sentence."""
    said = [refusal_by(*each.values) for each in RULES]
    if "REFUSALS_WRITTEN" in os.environ:
        TEXTS.write_text("\n".join(said) + "\n", encoding="utf-8")
    assert TEXTS.read_text(encoding="utf-8").splitlines() == said, (
        "read the new ones, then: REFUSALS_WRITTEN=1 pytest …"
    )


def absent_value(name, values=()):
    """The value at which an option or fact is not set; one that is none of `values` where its default is."""
    if name in ("backend", "controller"):
        return {"backend": "single", "controller": "gloo"}[name]
    if name in SECTIONS:
        default = option_fields()[name].default
        if default in values:
            return next(each for each in get_args(kinds_of(SECTIONS[name])[name][0]) if each not in values)
        return {} if default is dataclasses.MISSING else default
    (kind,) = (each for each in kinds_of(Facts)[name] if each is not type(None))
    return {bool: False, int: 1, str: ""}[kind]


def test_numbers_have_limits():
    numbers = {
        name
        for name, each in option_fields().items()
        if {int, float, tuple[int, ...]} & {*kinds_of(SECTIONS[name])[name]} and not declaration_of(each).valid
    }
    assert numbers == set(LIMITED)


def refusal(make):
    try:
        make()
    except OptionError as error:
        return error
    return None


@pytest.mark.parametrize("name", LIMITED)
def test_a_number_outside_its_limits_is_refused_by_its_flag(name):
    within = declaration_of(LIMITED[name]).within
    single, opening, low, high, closing = re.fullmatch(r"(?:(\S+) or )?([\[(])(\S+), (\S+)([\])])", within).groups()
    kinds = kinds_of(SECTIONS[name])[name]
    whole, many = int in kinds or tuple[int, ...] in kinds, tuple[int, ...] in kinds
    step = 1 if whole else 1e-6
    refused = [float(low) - step if opening == "[" else float(low), float("nan"), -1.0]
    refused += [] if high == "inf" else [float(high) + step if closing == "]" else float(high)]
    taken = [float(low) if opening == "[" else float(low) + step]
    taken += [] if high == "inf" else [float(high) if closing == "]" else float(high) - step]
    taken += [] if single is None else [float(single)]
    for bad in (refused[:1], *([each] for each in refused[1:])):
        value = bad[0] if not whole or bad[0] != bad[0] else int(bad[0])
        with pytest.raises(ConfigError) as raised:
            SECTIONS[name](**{name: (value,) if many else value})
        message = on_command_line(raised.value.message)
        assert message.startswith(f"--{name.replace('_', '-')} must be {limits_of(within)}. Received: "), message
    for good in taken:
        value = int(good) if whole else good
        error = refusal(lambda value=value: SECTIONS[name](**{name: (value,) if many else value}))
        assert error is None or "must be" not in error.problem, error  # it may need another option


def test_choices_are_named():
    for name in option_fields():
        for kind in kinds_of(SECTIONS[name])[name]:
            if get_args(kind) and get_origin(kind) not in (tuple, dict):
                with pytest.raises(ConfigError, match=r"must be one of .*Received: 'wrong'"):
                    SECTIONS[name](**{name: "wrong"})


@section
class Sample:
    """Options of this file."""

    speed: int = option(1, "[1, 10)", excludes("brake", why="one is enough", instead="leave out speed"))
    """How fast."""
    brake: bool = option(False, needs("speed"), applies_to("rail=ice|snow"))
    """Whether to stop."""
    rail: str = option("dry")
    """What is below."""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speed": 10}, "--speed must be in [1, 10). Received: 10."),
        ({"speed": 2.5}, "--speed must be in [1, 10). Received: 2.5."),
        ({"speed": 2, "brake": True, "rail": "ice"}, "--speed 2 does not go with --brake: one is enough. Leave out s"),
        ({"brake": True, "rail": "ice"}, "--brake needs --speed: add it."),
        (
            {"speed": 2, "brake": True},
            "--speed 2 does not go with --brake: one is enough. Leave out speed.",
        ),
    ],
)
def test_a_refusal_names_option_value_reason_and_advice(options, said):
    with pytest.raises(OptionError) as refused:
        Sample(**options)
    assert on_command_line(refused.value.message).startswith(said)


def test_a_refusal_is_made_again_from_its_message():  # as on a rank that is told of another's
    with pytest.raises(OptionError) as refused:
        Sample(speed=10)
    assert str(type(refused.value)(refused.value.message)) == str(refused.value)


def test_what_is_not_known_is_not_refused():
    check(Sample(), facts=Facts())
    check(SECTIONS["sequence_parallel"](sequence_parallel=True), facts=Facts(cp=None))
    check(SECTIONS["reduce_op"](reduce_op="adasum"), facts=Facts(size=4))


def test_documentation_is_up_to_date():
    page = Path(hvdtrain.__file__).parents[1] / "docs" / "options.md"
    text = page.read_text(encoding="utf-8")
    assert with_options(text) == text, "run: python -m hvdtrain.cli.reference docs/options.md"
    assert {name for name in SECTIONS if f"--{name.replace('_', '-')}" not in text} == set()
