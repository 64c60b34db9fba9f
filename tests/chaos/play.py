"""Plays a round: a training is struck, ends as it has to, and goes on to the parameters of one that was left alone."""

import contextlib
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.awake import awake_seconds
from tests.chaos.damage import damage_newest
from tests.chaos.jobs import Job
from tests.chaos.places import Place, discovered_hosts, small_disk
from tests.chaos.references import TIMEOUT_S, References
from tests.chaos.rounds import Round
from tests.chaos.trainings import TRAININGS, Training

_FULL_S = 0.5
"""How long a disk stays full that is freed again."""
_BY_PLACE = ("disk-full", "host-added", "host-removed")
"""Faults of what a rank needs."""


@dataclass
class Outcome:
    """What became of a round."""

    round: Round
    code: int | None = None
    detected_s: float | None = None
    """From the fault to the first line that tells of it: in an elastic job, to the step with which it goes on."""
    ended_s: float | None = None
    """From the fault to the end of the job's last process; None where the fault does not end it."""
    lost: int | None = None
    """Steps that were taken twice."""
    problems: list[str] = field(default_factory=list)
    text: str = ""
    """The end of the output of the job that did not do what it had to."""
    folder: str = ""
    """What it has left behind where something went wrong."""

    def record(self) -> dict[str, object]:
        """Return it as a line of JSON shows it."""
        return {**asdict(self), "round": None, **asdict(self.round), "command": self.round.command}


def play(of: Round, references: References, folder: Path) -> Outcome:
    """Play a round in a new folder, which stays if something goes wrong.

    Raises:
        NotPossible: this machine cannot do what its fault needs.
    """
    leaves_out, outcome = of.form in ("skip", "rollback"), Outcome(of)
    expected = "" if leaves_out else references.parameters(of)
    folder.mkdir(parents=True)
    training = TRAININGS[of.form](folder)
    with _place(of, training) as place:
        text = _strike(of, training, place, outcome)
        if not outcome.problems:
            text = _go_on(of, training, place, outcome, text)
        if not outcome.problems:
            expected = references.parameters(of, _left_out(of, text, outcome)) if leaves_out else expected
            _compare(training, text, expected, outcome)
        outcome.text = text[-6000:] if outcome.problems else ""
    if outcome.problems:
        outcome.folder = str(folder)
        (folder / "output.txt").write_text(text)
    else:
        shutil.rmtree(folder)
    return outcome


@contextlib.contextmanager
def _place(of: Round, training: Training) -> Iterator[Place]:
    if of.fault == "disk-full":
        with small_disk(training.folder) as place:
            yield place
    elif of.controller == "elastic":
        yield discovered_hosts(training.cwd, of.fault, spare=of.variant % 2 == 1)
    else:
        yield Place()


def _strike(of: Round, training: Training, place: Place, outcome: Outcome) -> str:
    """Start the training, strike it, and see how it ends; return its output."""
    words = [*place.launcher(of.controller, of.size), *training.words(_strike_words(of))]
    with Job(words, training.cwd) as job:
        struck = _when_struck(of, training, place, job)
        outcome.code = job.wait(TIMEOUT_S)
        if struck is None:
            outcome.problems.append("the training ended before it was struck")
        elif outcome.code is None:
            outcome.problems.append(f"did not end within {TIMEOUT_S:.0f} s")
        else:
            left, ended = job.wait_for_processes(), time.time()
            outcome.ended_s = None if outcome.code == 0 else round(ended - struck, 2)
            said = job.first(of.expected.names.format(rank=of.rank, step=of.step))
            outcome.detected_s = None if said is None else round(said - struck, 2)
            outcome.problems += _mistakes(of, outcome, left)
        return job.text


def _mistakes(of: Round, outcome: Outcome, left: set[int]) -> Iterator[str]:
    """Yield what the job did not do as its fault asks for."""
    fault = of.expected
    if outcome.code not in fault.codes:
        yield f"ended with code {outcome.code}, not {' or '.join(map(str, fault.codes))}"
    if outcome.detected_s is None:
        yield f"nothing was said like: {fault.names.format(rank=of.rank, step=of.step)}"
    if left:
        yield f"{len(left)} processes are left"
    if outcome.ended_s is not None and outcome.ended_s > fault.within_s:
        yield f"ended after {outcome.ended_s} s, not {fault.within_s:g} s"


def _strike_words(of: Round) -> list[str]:
    """Return the arguments by which a script strikes itself."""
    name = "SIGKILL" if of.fault == "corrupt" else of.fault
    return [name, str(of.rank), str(of.step), str(of.delay)]


def _when_struck(of: Round, training: Training, place: Place, job: Job) -> float | None:
    """Strike a training at its step, or see it strike itself; return when, or None if it ended before."""
    if of.form != "command" and of.fault not in _BY_PLACE:
        return _wait(lambda: _time_in(training.cwd / "struck"), job)
    if _wait(lambda: training.step() >= of.step or None, job) is None:
        return None
    time.sleep(of.delay)
    now = time.time()
    if of.fault not in _BY_PLACE:
        os.kill(job.rank(of.rank), signal.SIGKILL if of.fault == "corrupt" else signal.Signals[of.fault])
    else:
        place.strike(of.rank)
        if of.fault == "disk-full" and of.variant % 2:
            time.sleep(_FULL_S)
            place.mend()
    return now


def _go_on(of: Round, training: Training, place: Place, outcome: Outcome, text: str) -> str:
    """Start the training again, where it has not ended well; return the output of the one that has."""
    if outcome.code == 0:
        if of.controller == "elastic":
            outcome.lost = max(0, of.step - 1 - training.resumed_at(text))
        return text
    reached = training.step()
    damaged = damage_newest(training.checkpoints, of.variant) if of.fault == "corrupt" else ""
    place.mend()
    with Job([*place.launcher(of.controller, of.size), *training.words([])], training.cwd) as job:
        code, text = job.wait(TIMEOUT_S), job.text
    if code != 0:
        outcome.problems.append(f"the resumed training ended with code {code}")
    else:
        outcome.lost = max(0, reached - training.resumed_at(text))
    if damaged and f"{damaged} is damaged" not in text:
        outcome.problems.append(f"{damaged} was not named as damaged")
    return text


def _left_out(of: Round, text: str, outcome: Outcome) -> list[int]:
    """Return the first and the last step that a training has left out, as it says; they are those it has to."""
    if of.form == "skip":
        counted, steps = "{'non_finite': 1, 'spikes': 0, 'rollbacks': []}", [of.step, of.step]
    else:
        found = re.search(r"rolled back after step (\d+) to the checkpoint of step (\d+)", text)
        steps = [int(found[2]) + 1, int(found[1])] if found else [0, 0]
        counted = f"{{'non_finite': 1, 'spikes': 0, 'rollbacks': [{steps}]}}"
        if not (steps[0] <= of.step <= steps[1] < of.step + 5 and steps[0] > of.step - 7):
            outcome.problems.append(f"left out steps {steps[0]} to {steps[1]}")
    if set(re.findall(r"bad steps (\{.*)", text)) != {counted}:
        outcome.problems.append(f"not every rank counted {counted}")
    return steps


def _compare(training: Training, text: str, expected: str, outcome: Outcome) -> None:
    found = training.parameters(text)
    if not found:
        outcome.problems.append("the ranks do not end with the same parameters")
    elif not training.matches(found, expected):
        outcome.problems.append(f"other parameters: {found[:12]}, not {expected[:12]}")


def _wait(found: Callable[[], float | None], job: Job) -> float | None:
    """Return what `found` returns, once that is something; None if the job ends before."""
    limit = awake_seconds() + TIMEOUT_S
    while job.running and awake_seconds() < limit:
        value = found()
        if value is not None:
            return value
        time.sleep(0.005)
    return found()


def _time_in(path: Path) -> float | None:
    try:
        return float(path.read_text() or "nan")
    except OSError:
        return None
