"""The trainings of a round, as users start them, and what can be seen of them from outside."""

import base64
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SCRIPTS = Path(__file__).parent / "scripts"
_OPTIONS = {
    "model": "mlp",
    "epochs": "6",
    "checkpoint-every": "7",
    "keep": "4",
    "log-every": "1",
    "ema": "0.9",
    "hang-timeout": "5",
    "plots": "False",
    "tensorboard": "False",
}
_SAME = 1e-9
"""Of the largest parameter: numbers of 64 bits that another number of ranks has added."""


@dataclass(frozen=True)
class CommandTraining:
    """A run of the command line, which is struck from outside."""

    cwd: Path
    """The folder in which it is started."""

    def words(self, strike: Sequence[str]) -> list[str]:
        """Return the command of a rank, which may strike itself."""
        options = [word for key, value in _OPTIONS.items() for word in (f"--{key}", value)]
        sized = ["--model-args", "depth", "2", "width", "256"]
        return [sys.executable, "-m", "hvdtrain", "digits", "--run-dir", "run", "--resume", "auto", *options, *sized]

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return self.cwd / "run"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def step(self) -> int:
        """Return the last step that was reached, as far as can be seen; 0 before the first."""
        try:
            lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        except OSError:
            return 0
        return max((json.loads(line)["step"] for line in lines if line.endswith("}") and '"step"' in line), default=0)

    def parameters(self, text: str) -> str:
        """Return the final parameters, or a hash; empty where the training did not end, or its ranks differ."""
        summary = self.folder / "summary.json"
        return json.loads(summary.read_text())["parameter_hash"] if summary.exists() else ""

    def matches(self, found: str, expected: str) -> bool:
        return found == expected

    def resumed_at(self, text: str) -> int:
        """Return the step from which the training went on."""
        return int(json.loads((self.folder / "summary.json").read_text())["resumed_from"])


@dataclass(frozen=True)
class ScriptTraining:
    """A script of the user's own, which strikes itself."""

    cwd: Path
    script: str = "training_script.py"
    arguments: tuple[str, ...] = ()

    def words(self, strike: Sequence[str]) -> list[str]:
        return [sys.executable, str(SCRIPTS / self.script), *self.arguments, *strike]

    @property
    def folder(self) -> Path:
        return self.cwd / "saved"

    @property
    def checkpoints(self) -> Path:
        return self.folder

    def step(self) -> int:
        try:
            return int((self.cwd / "reached").read_text() or 0)
        except OSError:
            return 0

    def parameters(self, text: str) -> str:
        hashes = set(re.findall(r"parameters ([0-9a-f]{64})", text))
        return hashes.pop() if len(hashes) == 1 else ""

    def matches(self, found: str, expected: str) -> bool:
        return found == expected

    def resumed_at(self, text: str) -> int:
        found = re.search(r"resumed\D*?(\d+|None)", text)
        return int(found[1].replace("None", "0")) if found else 0


class ElasticTraining(ScriptTraining):
    """An elastic script: other numbers of ranks change the last bits of its parameters."""

    def parameters(self, text: str) -> str:
        same_on_all = super().parameters(text)
        return base64.b64encode(np.load(self.cwd / "parameters.npy").tobytes()).decode() if same_on_all else ""

    def matches(self, found: str, expected: str) -> bool:
        ours, theirs = (np.frombuffer(base64.b64decode(each)) for each in (found, expected))
        return ours.shape == theirs.shape and bool(np.abs(ours - theirs).max() <= _SAME * np.abs(theirs).max())

    def resumed_at(self, text: str) -> int:
        """Return the step after which the world went on that followed the fault, or from which the job did."""
        found = re.search(r"goes on after step ([\d,]+)", text) or re.search(r"begins after step (\d+)", text)
        return int(found[1].replace(",", "")) if found else 0


Training = CommandTraining | ScriptTraining


def _bad_steps(policy: str) -> Callable[[Path], Training]:
    return lambda cwd: ScriptTraining(cwd, "bad_steps_script.py", (policy,))


TRAININGS: dict[str, Callable[[Path], Training]] = {
    "command": CommandTraining,
    "script": ScriptTraining,
    "skip": _bad_steps("skip"),
    "rollback": _bad_steps("rollback"),
    "elastic": lambda cwd: ElasticTraining(cwd, "elastic_script.py"),
}
