"""Help and mistakes of `bench` and `data`, and what `launch` prints, which come before TensorFlow is loaded."""

import subprocess
import sys

import pytest

from hvdtrain.cli.main import main

BENCH = ["", "--parallel", "collectives", "compare", "report", "side", "engine", "layout"]
DATA = ["pack"]
PROGRAM = """
import sys
sys.modules["tensorflow"] = None  # an import of it would be an error
from hvdtrain.cli.main import main
for line in sys.argv[1:]:
    try:
        code = main(line.split())
    except SystemExit as leave:  # as argparse does
        code = leave.code
    assert not code, line
"""


def test_help_loads_no_tensorflow():
    lines = [
        *(f"bench {word} --help" for word in BENCH),
        *(f"data {word} --help" for word in DATA),
        "data",
        "launch digits",
    ]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *lines], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: python -m hvdtrain bench") == len(BENCH)
    assert done.stdout.count("usage: python -m hvdtrain data") == len(DATA) + 1


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("pack images other", "other exists already, and nothing in it is overwritten"),
        ("pack imagse packed", "There is no "),
        ("pack images packed --shards 2.5", "invalid int value"),
        ("pakc images packed", "Perhaps you meant: pack."),
    ],
)
def test_a_mistake_of_data_is_said_once_and_nothing_is_written(tmp_path, monkeypatch, capsys, line, part):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    for file in ("images/cat/1.png", "other/precious"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text("mine")
    assert main(["data", *line.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("hvdtrain: error:") == 1
    assert part in said
    assert not (tmp_path / "packed").exists()
    assert [file.name for file in (tmp_path / "other").iterdir()] == ["precious"]
