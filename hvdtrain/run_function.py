"""Calling a function on every rank of a job that is started for it, as notebooks need it."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.config.errors import ConfigError, LaunchError
from hvdtrain.runtime.launchers import detect_environment

T = TypeVar("T")

_RANK = """\
import sys

sys.path[:] = {path!r}
from hvdtrain.run_function import call_on_rank

call_on_rank({folder!r})
"""
"""Script of each rank."""
_CALL = "call.pickle"
_END_S = 60.0
"""Seconds that an interrupted job has to save and end, before it is killed."""


def run(
    function: Callable[..., T],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    np: int = 2,
    options: Sequence[str] = (),
    folder: str | PathLike[str] | None = None,
) -> list[T]:
    """Start a job of `np` ranks that call a function, and return their results by rank, as `horovod.run` does.

    The ranks are new processes: the function calls `hvdtrain.init()` itself, and finds no variable that it changes
    here. Their output is printed here. An interrupt (Ctrl-C, the stop button of a notebook) is passed on to the ranks.

    Args:
        function: called as `function(*args, **kwargs)` on each rank. It is sent by cloudpickle, so that functions of
            a notebook and lambdas can be sent, too, with the values that they use.
        args: positional arguments.
        kwargs: keyword arguments.
        np: number of ranks.
        options: options of `python -m hvdtrain launch`, such as `["--gloo"]`.
        folder: an existing folder that all hosts share, for ranks on other hosts than this one; default: a temporary
            one of this machine.

    Returns:
        The results of ranks 0 to `np` - 1; they are sent by cloudpickle, too.

    Raises:
        ConfigError: called within a job, with no function, or `np` is no number of ranks.
        LaunchError: the job failed; the message has the first exception of a rank.

    Example::

        def train(epochs):
            import hvdtrain

            hvdtrain.init()
            ...
            return trainer.fit(images, labels, epochs=epochs, batch=60).history

        histories = hvdtrain.run(train, [5], np=2)
    """
    import cloudpickle

    if detect_environment().size > 1:
        raise ConfigError("hvdtrain.run starts ranks itself. Received: a call within a job; call the function there.")
    if not callable(function):
        raise ConfigError(f"hvdtrain.run calls a function on each rank. Received: {function!r}.")
    if np < 1:
        raise ConfigError(f"hvdtrain.run needs at least one rank. Received: np={np}.")
    with tempfile.TemporaryDirectory(prefix="hvdtrain-run-", dir=folder) as name:
        place = Path(name).resolve()
        (place / _CALL).write_bytes(cloudpickle.dumps((function, tuple(args), dict(kwargs or {}))))
        script = place / "rank.py"
        script.write_text(_RANK.format(path=[os.path.abspath(entry) for entry in sys.path], folder=str(place)))
        launch = [sys.executable, "-m", "hvdtrain", "launch", "--run", "-np", str(np), *options, str(script)]
        code = _print_output_of(launch)
        results = [place / f"result-{rank}" for rank in range(np)]
        if code or not all(result.exists() for result in results):
            raise LaunchError(_why(place, np, code))
        return [pickle.loads(result.read_bytes()) for result in results]


def _print_output_of(command: list[str]) -> int:
    """Run a command in a process group of its own, print its output line by line, and return its exit code."""
    # A notebook shows what is written to sys.stdout, and nothing of what a child writes to its own.
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as job:
        assert job.stdout is not None
        try:
            for line in job.stdout:
                sys.stdout.write(line)
                sys.stdout.flush()
            return job.wait()
        except BaseException:
            _end(job)
            raise


def _end(job: subprocess.Popen[str]) -> None:
    """Interrupt a job, so that it saves, and kill what is left of it after a while."""
    for sign, seconds in ((signal.SIGINT, _END_S), (signal.SIGKILL, None)):
        with suppress(ProcessLookupError):
            os.killpg(job.pid, sign)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            job.communicate(timeout=seconds)
            return


def _why(place: Path, np: int, code: int) -> str:
    """Return why a job has no results: the first exception of a rank, if there is one."""
    errors = sorted(place.glob("error-*"), key=lambda error: error.stat().st_mtime_ns)
    if errors:
        rank = errors[0].name.removeprefix("error-")
        return f"The function failed on rank {rank}: {errors[0].read_text(encoding='utf-8')}"
    missing = [str(rank) for rank in range(np) if not (place / f"result-{rank}").exists()]
    return (
        f"The job ended with exit code {code} and without a result of rank {', '.join(missing)}; its output says why."
        if missing
        else f"The job ended with exit code {code} after the function returned; its output says why."
    )


def call_on_rank(folder: str) -> None:
    """Call the function of a `run` on this rank, and write its result, or its exception, to the folder."""
    import cloudpickle

    place, rank = Path(folder), detect_environment().rank
    try:
        function, args, kwargs = pickle.loads((place / _CALL).read_bytes())
        result = cloudpickle.dumps(function(*args, **kwargs))
    except Exception as error:
        (place / f"error-{rank}").write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        raise
    (place / f"result-{rank}").write_bytes(result)
