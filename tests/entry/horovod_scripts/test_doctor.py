"""`doctor` names the lines of the scripts that have to change, and no others."""

import ast
import re
import shutil

import pytest

from hvdtrain.cli.main import main
from tests.entry.horovod_scripts.rewriting import CHANGES, HERE

SCRIPTS = sorted(path for kind in ("examples", "others", "elastic") for path in (HERE / kind).glob("*.py"))


def statement_around(text, position):
    """Return the first and the last line of the smallest statement around a position."""
    line = text.count("\n", 0, position) + 1
    around = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno]
    smallest = min(around, key=lambda n: n.end_lineno - n.lineno)
    return smallest.lineno, smallest.end_lineno


def statements_that_change(path, flavour):
    text = path.read_text()
    for before, _ in CHANGES[flavour].get(path.name, []):
        for found in re.finditer(re.escape(before.strip("\n")), text):
            yield statement_around(text, found.start() + len(found[0]) - len(found[0].lstrip()))


@pytest.mark.parametrize("flavour", CHANGES)
def test_doctor_names_what_has_to_change(tmp_path, flavour, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if flavour == "tf_keras":
        monkeypatch.setenv("TF_USE_LEGACY_KERAS", "1")
    for path in SCRIPTS:
        shutil.copy(path, tmp_path)
    assert main(["doctor", "--script", ".", "--write"]) == 1
    said = capsys.readouterr().out
    assert len(re.findall(r"^\+import hvdtrain\.horovod", said, re.MULTILINE)) == len(SCRIPTS)
    named = {(name, int(line)) for name, line in re.findall(r"^(\w+\.py):(\d+): ", said, re.MULTILINE)}
    expected = {path.name: set(statements_that_change(path, flavour)) for path in SCRIPTS}
    missed = [
        (name, begin)
        for name, statements in expected.items()
        for begin, end in statements
        if not any(begin <= line <= end for script, line in named if script == name)
    ]
    needless = [(n, line) for n, line in named if not any(begin <= line <= end for begin, end in expected[n])]
    assert (missed, needless) == ([], [])
