"""What the command line says without starting a run: help, versions and hints."""

import math
import re
from configparser import ConfigParser
from pathlib import Path

import pytest

from hvdtrain.cli.main import main, version_line
from hvdtrain.cli.parser import ALIASES, COMMON, TITLES, options_of, sections_of
from hvdtrain.cli.train import Files, parse
from hvdtrain.config.errors import UserError
from hvdtrain.config.registry import resolve
from hvdtrain.config.run import Config

SCREEN = 40
SECTIONS = (Files, *sections_of(Config("")).values())
KNOWN = {option.flag: option for section in SECTIONS for option in options_of(section)}


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def printed(capsys, *argv):
    assert main(list(argv)) == 0
    return capsys.readouterr().out


# -- help --


@pytest.mark.parametrize("argv", [["--help"], ["train", "--help"], ["digits", "-h"], ["cifar10", "--help"]])
def test_help_fits_a_screen(capsys, argv):
    lines = printed(capsys, *argv).splitlines()
    assert len(lines) <= SCREEN
    assert max(map(len, lines)) <= (100 if argv == ["--help"] else 80)


def test_the_first_screen_names_every_option_in_its_group(capsys):
    text = printed(capsys, "train", "--help")
    words = set(text.split())
    groups = sections_of(Config(""))
    assert groups.keys() == TITLES.keys()
    for group, section in groups.items():
        assert {group, *(option.flag[2:] for option in options_of(section) if option.flag not in COMMON)} <= words
    assert all(f"\n  {flag} " in text for flag in (*COMMON, "--resume", "--run-dir", "--config"))


def test_the_help_of_a_group_explains_its_options(capsys):
    text = " ".join(printed(capsys, "digits", "--help", "optim").split())
    assert (
        "--schedule constant,cosine,step,polynomial Shape of the learning rate after the warm-up. (default: cosine)"
        in text
    )
    assert "--learning-rate FLOAT Peak learning rate, before any scaling by the batch. (default: 0.002)" in text
    assert "--epochs" not in text
    assert "--clip-norm FLOAT Bound on the L2 norm of the whole gradient." in text, "of a base class"


def test_a_group_that_is_none_is_refused(capsys):
    assert main(["train", "--help", "optm"]) == 2
    assert "There is no group of options 'optm'. Perhaps you meant: optim." in capsys.readouterr().err


# -- versions, and the command --


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_versions_in_a_line(capsys, flag):
    line = printed(capsys, flag).strip()
    assert line == version_line()
    assert re.fullmatch(r"hvdtrain \d\S* \(Python 3\.\S+, TensorFlow 2\.\S+, Keras 3\.\S+, Horovod \S+\)", line)


def test_the_command_is_declared():
    setup = ConfigParser()
    setup.read(Path(__file__).parents[3] / "setup.cfg")
    name, _, target = setup["options.entry_points"]["console_scripts"].strip().partition(" = ")
    assert name == "hvdtrain"
    assert callable(resolve("command", name, {name: target}))


# -- hints --


def hint(*argv):
    with pytest.raises(UserError) as raised:
        parse(list(argv))
    return str(raised.value.message)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr", "--learning-rate"),
        ("--lr=0.1", "--learning-rate"),
        ("--LR", "--learning-rate"),
        ("--batch-size", "--batch"),
        ("--batch_size", "--batch"),
        ("--bs", "--batch"),
        ("-b", "--batch"),
        ("-e", "--epochs"),
        ("--num-epochs", "--epochs"),
        ("--epoch", "--epochs"),
        ("--wd", "--weight-decay"),
        ("--lr-schedule", "--schedule"),
        ("--workers", "--data-threads"),
        ("--gradient-accumulation-steps", "--accumulate"),
        ("--bf16", "--precision"),
        ("--output-dir", "--run-dir"),
        ("--learning-rat", "--learning-rate"),
    ],
)
def test_what_other_programs_call_it_leads_to_the_option(typed, meant):
    flag = typed.partition("=")[0]
    text = hint("digits", typed, *([] if "=" in typed else ["3"]))
    assert text.startswith(f"There is no option {flag!r}. Perhaps you meant: {meant} {KNOWN[meant].value}\n")
    assert KNOWN[meant].help in text


def test_every_alias_leads_to_an_option_and_hides_none():
    assert {f"--{name}" for name in ALIASES.values()} <= KNOWN.keys()
    assert not {f"--{name}" for name in ALIASES} & KNOWN.keys()


def test_other_hints():
    assert "horovodrun -np" in hint("-np", "4")
    assert "Perhaps you meant: --plots False." in hint("--no-plots")
    assert hint("--zzzzzz", "1") == "There is no option '--zzzzzz'. python -m hvdtrain train --help lists the options."
    both = hint("--lr", "1", "--epoch", "2")
    assert "--learning-rate" in both
    assert "--epochs" in both


def test_what_is_valid_is_let_through():
    config = parse(
        ["--learning_rate", "0.5", "--jit", "--model-args", "bias", "-3", "rate", "-1e-3", "low", "-inf"]
    ).config
    assert config.optim.learning_rate == 0.5
    assert config.model.model_args == {"bias": -3, "rate": -1e-3, "low": -math.inf}
