import subprocess
import sys

import pytest

from hvdtrain.cli.main import VERBS
from hvdtrain.config.errors import ConfigError
from hvdtrain.config.registry import check_arguments, resolve, suggestion
from hvdtrain.data.registry import SOURCES
from hvdtrain.models.registry import MODELS
from hvdtrain.recipes import DEFAULT, RECIPES, describe, recipe

TABLE = {"path": "pathlib:Path", "fraction": "fractions:Fraction", "broken": "no_such_module:thing"}


def test_a_name_stands_for_what_the_table_says():
    from fractions import Fraction

    assert resolve("number", "fraction", TABLE) is Fraction


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("fractoin", "Unknown number 'fractoin'. Perhaps you meant: fraction."),
        ("zzz", "Unknown number 'zzz'. Available: broken, fraction, path."),
        ("", "Unknown number ''. Available: broken, fraction, path."),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest_or_with_all(name, answer):
    with pytest.raises(ConfigError) as raised:
        resolve("number", name, TABLE)
    assert str(raised.value) == answer


def test_a_row_that_does_not_import_is_no_mistake_of_the_user():
    with pytest.raises(ModuleNotFoundError):
        resolve("number", "broken", TABLE)


def test_one_suggestion_is_made():
    assert suggestion("digit", {"digits": "", "digits2": "", "cifar": ""}) == " Perhaps you meant: digits."


def test_nothing_is_suggested_where_there_is_nothing():
    assert suggestion("digit", {}) == ""


def builder(shape, *more, width: int = 8, rate: float = 0.1, flag: bool = False, kind: str = "a", seed=None, **rest):
    raise AssertionError("checking arguments calls nothing")


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"width": 3, "rate": 0.5, "flag": True, "kind": "b"},
        {"rate": 1},  # a whole number is a number
        {"seed": 3},
        {"seed": "any"},  # a default of None says nothing about the type
    ],
)
def test_arguments_that_fit(given):
    check_arguments("model", "mine", builder, given)


@pytest.mark.parametrize(
    ("given", "answer"),
    [
        ({"wdth": 3}, "The model 'mine' takes no argument 'wdth'. Perhaps you meant: width."),
        ({"zzzzz": 3}, "takes no argument 'zzzzz'. Available: flag, kind, rate, seed, width."),
        ({"shape": 3}, "takes no argument 'shape'"),  # not an option: the trainer gives it
        ({"rest": 3}, "takes no argument 'rest'"),
        ({"more": 3}, "takes no argument 'more'"),
        ({"width": 3.0}, "The argument 'width' of the model 'mine' must be int. Received: 3.0."),
        ({"width": "3"}, "'width' of the model 'mine' must be int. Received: '3'."),
        ({"width": True}, "must be int. Received: True."),
        ({"rate": True}, "must be float. Received: True."),
        ({"rate": "0.1"}, "must be float. Received: '0.1'."),
        ({"flag": 1}, "must be bool. Received: 1."),
        ({"kind": 1}, "must be str. Received: 1."),
        ({"seed": 1, "kind": False}, "must be str. Received: False."),
    ],
)
def test_arguments_that_do_not_fit_are_named(given, answer):
    with pytest.raises(ConfigError) as raised:
        check_arguments("model", "mine", builder, given)
    assert answer in str(raised.value)


@pytest.mark.parametrize("table", [SOURCES, MODELS, VERBS], ids=["sources", "models", "verbs"])
def test_every_row_leads_somewhere(table):
    for name in table:
        thing = resolve("thing", name, table)
        assert callable(thing) or callable(thing.build), name


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_knows_its_name_and_says_what_it_is_in_a_line(name):
    assert recipe(name).recipe == name
    assert 10 < len(describe(name)) < 120


def test_the_default_recipe_exists():
    assert DEFAULT in RECIPES


def test_no_name_is_both_a_verb_and_a_recipe():
    assert not VERBS.keys() & RECIPES.keys()


def test_listing_recipes_and_their_options_imports_no_tensorflow():
    code = (
        "import sys; from hvdtrain.recipes import RECIPES, recipe, describe\n"
        "[(recipe(name), describe(name)) for name in RECIPES]\n"
        "print([m for m in ('tensorflow', 'keras', 'horovod', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
