"""Errors speak of a script's arguments in a script, and of flags on the command line."""

import ast
import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path

import pytest

import hvdtrain
from hvdtrain.config.errors import ARGUMENTS, ConfigError, in_script, on_command_line
from hvdtrain.config.run import Config
from hvdtrain.observability.events import RunInfo
from hvdtrain.runtime.failures import describe
from hvdtrain.training.options import StepOptions, step_options

PACKAGE = Path(hvdtrain.__file__).parent
COMMAND_LINE_ONLY = (
    *("cli", "installation", "bench", "runs", "recipes", "models"),
    *("data/sources", "data/files", "data/packing", "horovod/data/compute_worker.py", "runtime/launch/"),
)
"""Rooms whose errors no script of a user's own meets."""
FLAG = re.compile(r"(?<![\w'\"`-])--([a-z][a-z-]*)")
OTHER_PROGRAM = re.compile(r"\b(horovodrun|mpirun|srun|docker run) -[^\s,;)]*|^--?[\w-]+(=[\w,.-]+)?$")


@pytest.mark.parametrize(
    ("message", "script", "command_line"),
    [
        ("--accumulate must be", "accumulate must be", "--accumulate must be"),
        ("use --precision=mixed_bfloat16.", "use precision='mixed_bfloat16'.", "use --precision mixed_bfloat16."),
        ("Use --batch=60 or --batch=66, or", "Use batch=60 or batch=66, or", "Use --batch 60 or --batch 66, or"),
        ("--learning-rate=1e-05 was", "learning_rate=1e-05 was", "--learning-rate 1e-05 was"),
        ("and --replicas=N", "and replicas=N", "and --replicas N"),
        ("leave out --jit", "leave out jit", "leave out --jit"),
        ("see --resume RUN, --max-steps=3", "see --resume RUN, --max-steps 3", "see --resume RUN, --max-steps 3"),
        ("start with srun --mpi=pmix, or", "start with srun --mpi=pmix, or", "start with srun --mpi=pmix, or"),
        ("Received: '--batch'.", "Received: '--batch'.", "Received: '--batch'."),
    ],
)
def test_options_are_worded_for_the_reader(message, script, command_line):
    error = ConfigError(message)
    assert str(error) == in_script(message) == describe(error) == script
    assert on_command_line(error.message) == describe(error, on_command_line) == command_line


def test_the_arguments_are_those_that_scripts_have():
    sections = [section for section in vars(Config("")).values() if is_dataclass(section)]
    flags = {option.name for section in sections for option in fields(section)}
    functions = (hvdtrain.init, hvdtrain.Trainer.__init__, hvdtrain.Trainer.fit, hvdtrain.learning_rate_schedule)
    functions = (*functions, hvdtrain.parallelize)
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    taken |= {option.name for option in fields(StepOptions)}
    assert flags & taken == ARGUMENTS | {"model"}  # which has a name on the command line, and is an object in a script


def files(*without):
    return [path for path in PACKAGE.rglob("*.py") if not path.relative_to(PACKAGE).as_posix().startswith(without)]


def messages(path):
    """Every text of a file, but docstrings, with the place where it is written."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield f"{path.relative_to(PACKAGE)}:{node.lineno}", node.value


ELSEWHERE = {
    # What cannot happen outside of a run, or is worded by who shows it.
    "augment": "options of a run's data",
    "cache": "options of a run's data",
    "data": "options of a run's data",
    "data-args": "options of a run's data",
    "data-workers": "options of a run's data",
    "on-bad-record": "options of a run's data",
    "shard-by": "options of a run's data",
    "tail": "options of a run's data",
    "model": "a run's model",
    "model-args": "a run's model",
    "embedding-sharding": "a run's model",
    "resume": "a run that goes on",
    "ema": "the optimizer of a run",
    "max-steps": "a run's length",
    "eval-batch": "a run's data",
    "keep": "a run's checkpoints",
    "keep-best": "a run's checkpoints",
    "keep-best-mode": "a run's checkpoints",
    "keep-every-hours": "a run's checkpoints",
    "grace-seconds": "a run's checkpoints",
    "checkpoint-every": "a run's checkpoints",
    "metrics-host": "what a run reports",
    "metrics-port": "what a run reports",
    "weight-decay": "the optimizer of a run",
    "query-gpu": "nvidia-smi",
    "format": "nvidia-smi",
    "bind-to": "mpirun",
    "version": "mpirun",
    "gloo": "horovodrun",
    "network-interfaces": "horovodrun",
    "mpi": "horovodrun",
    "shm-size": "docker",
    "gpu": "python -m hvdtrain setup",
}


def test_every_message_that_a_script_may_meet_names_arguments():
    """In rooms that scripts reach, a flag is an argument of scripts too, or one that only a run can be about."""
    strange = {
        f"{place}: --{flag}"
        for path in files(*COMMAND_LINE_ONLY)
        for place, text in messages(path)
        for flag in FLAG.findall(text)
        if flag.replace("-", "_") not in ARGUMENTS and flag not in ELSEWHERE
    }
    assert not strange


def test_no_value_follows_its_flag_after_a_space():
    """`--precision mixed_bfloat16` would read `precision mixed_bfloat16` in a script: it is written with `=`."""
    values = re.compile(
        r"(?<![\w'\"`-])--(?!data|model|resume|run|config)[a-z-]+ (\d|adasum|horovod|single|mixed_|N\b)"
    )
    assert not [
        place
        for path in files("cli", "installation", "bench")
        for place, text in messages(path)
        if values.search(text) and not OTHER_PROGRAM.search(text)
    ]


@pytest.mark.parametrize(("given", "text"), [({"accumulate": 0}, "accumulate must be at least 1. Received: 0.")])
def test_a_scripts_mistake_is_said_in_its_words(given, text):
    with pytest.raises(ConfigError) as raised:
        step_options(given)
    assert str(raised.value) == text


def test_advice_is_worded_for_the_reader():
    facts = dict.fromkeys(field.name for field in fields(RunInfo) if field.default is field.default_factory is MISSING)
    assert RunInfo(**facts).wording("a larger --batch") == "a larger batch"
    assert RunInfo(**facts, wording=on_command_line).wording("a larger --batch") == "a larger --batch"
