"""`watch`: follow a run from another terminal."""

import argparse
import time
from pathlib import Path

from hvdtrain.cli.local import run_here
from hvdtrain.config.errors import CheckpointError
from hvdtrain.observability.console import make_console
from hvdtrain.observability.status import RunStatus
from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.watching import RunFollower, Seen, read_summary
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.terminal import on_terminal, say

PAUSE_S = 0.5
"""Between two looks at the folder."""
UNSEEN_S = 3.0
"""A run of which nothing is left is given up after so many seconds: its folder may be on a slow disk."""
UNSEEN_ELASTIC_S = 120.0
"""An elastic job forms a new world meanwhile, in which another rank writes to the folder."""
EXIT_CODES: dict[Seen, int] = {"failed": 1, "died": 1}


def main(argv: list[str]) -> int:
    """Show a run until it ends; return 0, 1 if it failed or died, 2 for a mistake, 130 after Ctrl-C."""
    return run_here(lambda: _parser().parse_args(argv), _watch)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m hvdtrain watch",
        description="Follow a run with the display of train, by reading its folder: from another terminal, or from "
        "another host that sees the folder. Ctrl-C ends the display and leaves the run alone. The exit code is 1 if "
        "the run failed or died.",
    )
    parser.add_argument(
        "run", type=Path, metavar="RUN_DIR", help="the run's folder; one that is yet to come is awaited"
    )
    parser.add_argument("--once", action="store_true", help="show how it stands, and do not wait for more")
    return parser


def _watch(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.run
    live = not arguments.once and on_terminal(detect_environment())
    console = make_console(live=live)
    follower = RunFollower(folder, console)
    try:
        seen = follower.look() if arguments.once else _follow(follower, folder)
    finally:
        console.close()
    status = follower.status
    if status is None:
        raise CheckpointError(_no_run(folder))
    if seen == "finished":
        console.on_end(read_summary(folder))
    else:
        print(_described(seen, status, follower.step), flush=True)
    return EXIT_CODES.get(seen, 0)


def _follow(follower: RunFollower, folder: Path) -> Seen:
    """Show the run until it has ended."""
    last_alive, awaited = time.monotonic(), False
    while True:
        seen = follower.look()
        if seen == "none":
            if RunFolder(folder).config.is_file():
                raise CheckpointError(_no_run(folder))
            if not awaited:
                say(f"hvdtrain: {folder} has not begun; waiting for it")
            awaited = True
        if seen in ("none", "running"):
            last_alive = time.monotonic()
        elif seen != "died" or time.monotonic() - last_alive > _patience(follower.status):
            return follower.look()  # with what came between the last records and the end
        time.sleep(PAUSE_S)


def _patience(status: RunStatus | None) -> float:
    return UNSEEN_ELASTIC_S if status is not None and status.elastic else UNSEEN_S


def _described(seen: Seen, status: RunStatus, step: int) -> str:
    """Return a line on a run that is not finished."""
    where = f"{status.info.run_dir}, at step {step} of {status.info.total_steps}"
    resume = f"`python -m hvdtrain --resume {status.info.run_dir}` goes on from its newest checkpoint"
    if seen == "running":
        return f"running on {status.host}: {where}"
    if seen == "stopped":
        return f"stopped by a signal and saved: {where}. {resume}."
    if seen == "failed":
        return f"failed: {where}. {status.error} {resume}; logs/ has what the ranks wrote."
    return f"died without a word (process {status.process} on {status.host}): {where}. {resume}."


def _no_run(folder: Path) -> str:
    if RunFolder(folder).config.is_file():
        return (
            f"watch {folder}: the run has no {RunFolder(folder).status.name}. It is about to begin, or an earlier "
            "version wrote it: look at its metrics.jsonl."
        )
    return f"watch {folder}: there is no run (no {RunFolder(folder).status.name} in it)."
