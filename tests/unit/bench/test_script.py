"""A script that launches its own functions, as those in benchmarks/ do."""

import subprocess
import sys

import pytest

from hvdtrain.bench.results import read_results
from hvdtrain.bench.script import print_times

SCRIPT = '''
"""A script."""
import sys
from hvdtrain.bench.script import Script, print_times


def measure(side, fails):
    if side == fails:
        raise ValueError("no such side")
    return {"ms": {"a": 2.0, "b": [1.0, 3.0, 8.0]}[side]}


script = Script(__doc__, measure)
script.add_argument("--fails")
options = script.parsed()
jobs = [script.job(side, measure, side=side, fails=options.fails) for side in "ab"]
runs = script.measure(jobs, 2)
print_times("both", {run.name: run.medians("ms") for run in runs}, "a")
script.record("here", {"batch": 8}, {"ms": 5.0})
sys.exit(script.exit_code())
'''


@pytest.fixture
def script(tmp_path):
    (tmp_path / "both.py").write_text(SCRIPT)

    def run(*words):
        command = [sys.executable, str(tmp_path / "both.py"), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)

    return run


def test_its_functions_take_turns_and_its_results_have_the_schema_of_all(script, tmp_path):
    done = script("--out", "results/results.json")
    assert done.returncode == 0, done.stderr
    assert "both  b                              3.00 ms   1.500 of a (1.500 .. 1.500)" in done.stdout
    comparison = read_results(tmp_path / "results").comparisons["both"]
    assert {run.name: run.figure("ms") for run in comparison.runs} == {
        "a": [2.0, 2.0],
        "b": [[1.0, 3.0, 8.0]] * 2,
        "here": [5.0],
    }
    assert comparison.command == "python benchmarks/both.py --out results/results.json"


@pytest.mark.extended
def test_what_fails_is_reported_and_the_rest_goes_on(script):
    done = script("--fails", "a")
    assert done.returncode == 1
    assert "not measured: exit code 1: ValueError: no such side" in done.stdout
    assert "both  b                              3.00 ms\n" in done.stdout


def test_ratios_are_formed_by_round(capsys):
    print_times("", {"plain": [10.0, 20.0, 30.0], "ours": [5.0, 20.0, 60.0]}, "plain", {"ours": "more"})
    assert capsys.readouterr().out.splitlines()[1].endswith("20.00 ms   1.000 of plain (0.500 .. 2.000)   more")
