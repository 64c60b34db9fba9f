"""Options and fixtures of all tests."""

import signal
from pathlib import Path

import pytest

from tests.report import Recorder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--report", type=Path, metavar="FILE", help="write outcome and seconds of each test to FILE (JSON)"
    )


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--report")
    if path and not hasattr(config, "workerinput"):  # processes of pytest-xdist report to the first one
        config.pluginmanager.register(Recorder(path))


LONGEST = (
    *("keras_io/test_examples.py", "test_keras_suite.py", "test_wheel.py", "entry/test_elastic.py", "test_recipes.py"),
    *("test_bench.py", "test_sharded_tables.py", "test_train.py", "test_lost_workers.py", "test_backends.py"),
    *("test_migration.py", "test_preemption.py", "entry/test_examples.py"),
)
"""Files whose tests take minutes, some one after another: begun last, they would be waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        path = item.path.as_posix()
        return next((number for number, end in enumerate(LONGEST) if path.endswith(end)), len(LONGEST))

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Let Ctrl-C interrupt, as in the foreground.

    A shell starts background jobs with SIGINT ignored, and so it stays in every process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
