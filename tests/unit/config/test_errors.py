"""Errors speak of a script's arguments in a script, and of flags on the command line."""

import ast
import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.config.errors import ConfigError, LaunchError, in_script, on_command_line, opt
from hvdtrain.config.run import Config, option_fields
from hvdtrain.observability.events import RunInfo
from hvdtrain.runtime.failures import describe
from hvdtrain.training.options import StepOptions, step_options

ARGUMENTS = {name for name, option in option_fields().items() if option.metadata["declaration"].argument}
PACKAGE = Path(hvdtrain.__file__).parent
COMMAND_LINE_ONLY = (
    *("cli", "installation", "bench", "runs", "recipes", "models"),
    *("data/sources", "data/files", "data/pack.py"),
)
"""Rooms whose errors no script of a user's own meets."""
FLAG = re.compile(r"(?<![\w'\"`-])--([a-z][a-z-]*)")
NOT_OF_ERRORS = ("runtime/diagnosis/", "runtime/hierarchy_choice.py")
"""What doctor says, and notes of a job's start, which are worded for the command line alone."""


@pytest.mark.parametrize(
    ("message", "script", "command_line"),
    [
        (f"{opt('accumulate')} must be", "accumulate must be", "--accumulate must be"),
        (
            f"use {opt('precision', 'mixed_bfloat16')}.",
            "use precision='mixed_bfloat16'.",
            "use --precision mixed_bfloat16.",
        ),
        (f"Use {opt('batch', 60)} or {opt('batch', 66)}", "Use batch=60 or batch=66", "Use --batch 60 or --batch 66"),
        (f"{opt('learning_rate', 1e-05)} was", "learning_rate=1e-05 was", "--learning-rate 1e-05 was"),
        (f"and {opt('replicas', 'N')}", "and replicas=N", "and --replicas N"),
        (f"use {opt('parallel', 'tp=2')}", "use parallel='tp=2'", "use --parallel tp=2"),
        (
            f"see --resume RUN, {opt('max_steps', 3, argument=False)}",
            "see --resume RUN, --max-steps 3",
            "see --resume RUN, --max-steps 3",
        ),
        ("start with srun --mpi=pmix, or", "start with srun --mpi=pmix, or", "start with srun --mpi=pmix, or"),
    ],
)
def test_options_are_worded_for_the_reader(message, script, command_line):
    error = ConfigError(message)
    assert str(error) == in_script(message) == describe(error) == script
    assert on_command_line(error.message) == describe(error, on_command_line) == command_line


@pytest.mark.parametrize("users", ["/data/my --batch=3 run", "--jit", "'--batch'", "Use --precision=mixed_bfloat16."])
def test_a_users_own_text_stays_as_it_is(users):
    error = ConfigError(f"{opt('batch')} does not fit. Received: {users}")
    assert str(error) == f"batch does not fit. Received: {users}"
    assert describe(error, on_command_line) == f"--batch does not fit. Received: {users}"


def test_an_error_that_becomes_part_of_another_is_worded_with_it():
    error = LaunchError(f"{ConfigError(opt('jit')).message} and {opt('batch', 3)}")
    assert str(error) == "jit and batch=3"
    assert describe(error, on_command_line) == "--jit and --batch 3"


def test_an_error_is_shown_as_it_is_worded():
    assert repr(ConfigError(f"{opt('batch')} must be positive.")) == "ConfigError('batch must be positive.')"


def test_options_may_be_called_otherwise():
    called = {"reduce_op": "op", "sparse_gradients=gather": "sparse_as_dense=False"}
    message = f"{opt('reduce_op', 'adasum')}, {opt('sparse_gradients', 'gather')}, {opt('jit')}: reduce_op"
    assert in_script(message, called) == "op='adasum', sparse_as_dense=False, jit: reduce_op"


def test_the_arguments_are_those_that_scripts_have():
    sections = [section for section in vars(Config("")).values() if is_dataclass(section)]
    flags = {option.name for section in sections for option in fields(section)}
    functions = (hvdtrain.init, hvdtrain.Trainer.__init__, hvdtrain.Trainer.fit, hvdtrain.learning_rate_schedule)
    functions = (*functions, hvdtrain.parallelize)
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    taken |= {option.name for option in fields(StepOptions)}
    assert flags & taken == ARGUMENTS | {"model"}  # an object in a script


def files(*without):
    return [path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(without)]


def messages(path):
    """Every text of a file, but docstrings, with the place where it is written."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


def test_messages_that_a_script_may_meet_name_options_by_opt():
    """A flag in the text itself would read as a flag in a script, too."""
    flags = {
        f"{place}: --{flag}"
        for path in files(*COMMAND_LINE_ONLY)
        for place, text in messages(path)
        for flag in FLAG.findall(text)
        if flag.replace("-", "_") in ARGUMENTS and not place.startswith(NOT_OF_ERRORS)
    }
    assert not flags


def test_opt_names_options():
    """By their fields, or by a variable; those that are no arguments say so."""
    named = [
        (path, ast.literal_eval(node.args[0]), not node.keywords)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") == "opt"
        and isinstance(node.args[0], ast.Constant)
    ]
    assert len(named) > 120
    assert not [(path.name, name) for path, name, _ in named if name not in option_fields()]
    assert not [(path.name, name) for path, name, argument in named if argument != (name in ARGUMENTS)]


@pytest.mark.parametrize(("given", "text"), [({"accumulate": 0}, "accumulate must be at least 1. Received: 0.")])
def test_a_scripts_mistake_is_said_in_its_words(given, text):
    with pytest.raises(ConfigError) as raised:
        step_options(given)
    assert str(raised.value) == text


def test_advice_is_worded_for_the_reader():
    facts = dict.fromkeys(field.name for field in fields(RunInfo) if field.default is field.default_factory is MISSING)
    advice = f"a larger {opt('batch')}"
    assert RunInfo(**facts).wording(advice) == "a larger batch"
    assert RunInfo(**facts, wording=on_command_line).wording(advice) == "a larger --batch"
