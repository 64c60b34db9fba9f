"""One rank of the launches of test_control_launch.py: ``control_script.py checks|early|stuck``."""

import signal
import sys
import time
from pathlib import Path

import pytest

from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.control.agreement import agree, installed_versions, on_first, together
from hvdtrain.runtime.control.channel import ControlChannel, end_process
from hvdtrain.runtime.failures import FailFast, Grace, show_failure
from hvdtrain.runtime.launchers import Environment, detect_environment
from hvdtrain.runtime.link import Watchdog, open_control


def open_here() -> tuple[Environment, ControlChannel]:
    environment = detect_environment()
    return environment, open_control(environment, timeout=30)


def check_exchange(channel: ControlChannel) -> None:
    for length in (0, 10, 3_000, 2_000_000):
        payloads = [b"%d" % rank * length for rank in range(channel.size)]
        assert channel.exchange(payloads[channel.rank], timeout=20) == payloads


def check_agreement(channel: ControlChannel) -> None:
    agree(channel, installed_versions(), timeout=20)
    assert together(channel, lambda: channel.rank, timeout=20) == channel.rank
    assert on_first(channel, lambda: b"from %d" % channel.rank, timeout=20) == b"from 0"
    with pytest.raises(LaunchError, match="seed is 0 on ranks 0, 2 but 1 on rank 1"):
        agree(channel, {"seed": str(channel.rank % 2)}, timeout=20)


def check_idle_wait(channel: ControlChannel) -> None:
    """Waiting for a late rank must leave the core to others."""
    if channel.rank == 0:
        time.sleep(2.0)
    before = time.process_time()
    channel.barrier(20)
    assert time.process_time() - before < 1.0, f"{time.process_time() - before:.2f} s of CPU in 2 s of waiting"


def check_failures(channel: ControlChannel) -> None:
    if channel.rank == 1:
        channel.report_failure("a long story " * 1000)
    deadline = time.monotonic() + 60
    while channel.rank != 1 and not channel.failures() and time.monotonic() < deadline:
        time.sleep(0.02)
    expected = {} if channel.rank == 1 else {1: "a long story " * 1000}
    assert channel.failures() == expected


def check_board(channel: ControlChannel) -> None:
    """Posts pass by an exchange that is under way, and a thousand of them leave the last one."""
    if channel.rank == 1:
        for number in range(1000):
            channel.post("number", b"%d" % number)
        channel.post("long", b"x" * 200_000)
    deadline = time.monotonic() + 60
    while channel.read("number") != {1: b"999"} or channel.read("long") != {1: b"x" * 200_000}:
        assert time.monotonic() < deadline, channel.read("number")
        channel.failures()
        time.sleep(0.01)
    channel.barrier(60)


def check_timeout(channel: ControlChannel) -> None:
    """A rank that does not come to a barrier is named by the others."""
    if channel.rank == 2:
        deadline = time.monotonic() + 60
        while not all(Path(f"named-by-{rank}").exists() for rank in (0, 1)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return
    with pytest.raises(LaunchError, match="rank 2 of 3"):
        channel.barrier(0.5)
    Path(f"named-by-{channel.rank}").touch()


def checks() -> None:
    for part in (check_exchange, check_agreement, check_idle_wait, check_failures, check_board, check_timeout):
        environment, channel = open_here()
        part(channel)
        channel.close()
    print(f"rank {environment.rank} of {environment.size} over {environment.controller}: all well", flush=True)


def early() -> None:
    """Rank 1 fails before it opens the channel, while the others wait for it."""
    environment = detect_environment()
    if environment.rank == 1:
        end_process(show_failure(environment, LaunchError("too early")))
    open_control(environment, timeout=60)


def stuck() -> None:
    """Rank 1 reports a failure but does not end the job: the watchdogs of the others do."""
    _, channel = open_here()
    Watchdog(channel, FailFast(Grace(hanging=1.0)), interval=0.2).start()
    if channel.rank == 1:
        channel.report_failure("text")
    signal.pause()


if __name__ == "__main__":
    {"checks": checks, "early": early, "stuck": stuck}[sys.argv[1]]()
