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


LONGEST = tuple(
    f"test_{name}.py"
    for name in ("wheel", "elastic", "train", "lost_workers", "backends", "migration", "preemption", "examples")
)
"""Files whose tests take the most of a minute, some one after another: begun last, they would be waited for."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Let Ctrl-C interrupt, as in the foreground.

    A shell starts background jobs with SIGINT ignored, and so it stays in every process that a test starts.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
