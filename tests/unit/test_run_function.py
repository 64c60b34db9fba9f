import subprocess
import sys

import pytest

import hvdtrain
from hvdtrain import run_function
from hvdtrain.config.errors import ConfigError, LaunchError


@pytest.fixture
def here(monkeypatch):
    """Ranks that are called one after the other in a process without a launcher: what is tested is what travels."""

    def call(command):
        size, script = int(command[command.index("-np") + 1]), command[-1]
        code = 0
        for rank in range(size):
            environ = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(size)}
            environ |= {"OMPI_COMM_WORLD_LOCAL_RANK": str(rank), "OMPI_COMM_WORLD_LOCAL_SIZE": str(size)}
            done = subprocess.run([sys.executable, script], env=environ, check=False, capture_output=True, text=True)
            code = code or done.returncode
        return code

    monkeypatch.setattr(run_function, "_print_output_of", call)


def test_results_come_by_rank_and_what_a_function_uses_travels_with_it(here):
    factor = 3

    def function(number, *, offset):
        import os

        return int(os.environ["OMPI_COMM_WORLD_RANK"]) + factor * number + offset

    assert hvdtrain.run(function, [5], {"offset": 100}, np=2) == [115, 116]
    assert hvdtrain.run(lambda: (1, "a"), np=1) == [(1, "a")]


def test_the_first_exception_of_a_rank_is_named(here):
    def function():
        import os

        if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
            raise KeyError("no such word")

    with pytest.raises(LaunchError, match="The function failed on rank 1: KeyError: 'no such word'"):
        hvdtrain.run(function, np=2)


def test_a_rank_that_ends_without_a_result_is_named(here):
    def function():
        import os

        os._exit(3 * int(os.environ["OMPI_COMM_WORLD_RANK"]))

    with pytest.raises(LaunchError, match="ended with exit code 3 and without a result of rank 0, 1; its output"):
        hvdtrain.run(function, np=2)


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank(here):
    with pytest.raises(LaunchError, match="The function failed on rank 0: TypeError: cannot pickle"):
        hvdtrain.run(lambda: (number for number in range(3)), np=1)


def test_what_cannot_be_started_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"at least one rank\. Received: np=0"):
        hvdtrain.run(print, np=0)
    with pytest.raises(ConfigError, match=r"calls a function on each rank\. Received: 'train'"):
        hvdtrain.run("train")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2")
    with pytest.raises(ConfigError, match="a call within a job"):
        hvdtrain.run(print)
