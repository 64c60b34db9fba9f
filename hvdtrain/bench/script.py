"""The frame of a script in benchmarks/: options, its functions on launched ranks, results. No TensorFlow."""

import argparse
import functools
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.bench.engine import Job, Launch, launch, launcher, measure, say
from hvdtrain.bench.results import Comparison, Figure, Round, Run, new_results, write_results
from hvdtrain.config.errors import LaunchError
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.session import current

CALL = "--call"
_log = functools.partial(print, flush=True)


class Script(argparse.ArgumentParser):
    """The command line of a script, which launches its own functions.

    Args:
        doc: the script's docstring.
        functions: what it launches; each returns figures, of which rank 0's are taken.
        rounds: default of `--rounds`; None: there is none.
        ranks: default of `--ranks`, beside `--controllers`; None: there are none.
    """

    def __init__(
        self,
        doc: str | None,
        *functions: Callable[..., Mapping[str, Figure]],
        rounds: int | None = None,
        ranks: int | None = None,
    ) -> None:
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
        if ranks is not None:
            both = ("mpirun", "gloo")
            self.add_argument("--controllers", nargs="+", choices=both, default=list(both))
            self.add_argument("--ranks", type=int, default=ranks, help=f"({ranks})")
        if rounds is not None:
            self.add_argument("--rounds", type=int, default=rounds, help=f"({rounds})")
        self.add_argument("--out", type=Path, help="results.json to write, for `python -m hvdtrain bench report`")
        self._functions = {function.__name__: function for function in functions}
        self._options = argparse.Namespace()
        self._runs: list[Run] = []

    def parsed(self) -> argparse.Namespace:
        """Return the options; in a process that was launched, call the function instead, and exit."""
        if sys.argv[1:2] == [CALL]:
            name, given = sys.argv[2:4]
            figures = self._functions[name](**json.loads(given))
            if _is_first():
                say(figures)
            sys.exit(0)
        self._options = self.parse_args()
        return self._options

    def job(
        self,
        name: str,
        function: Callable[..., Any],
        *,
        controller: str = "none",
        ranks: int = 1,
        before: Sequence[str] = (),
        **given: Any,
    ) -> Job:
        """Return the job that calls `function` with `given` on ranks; `before` comes before Python."""
        words = [sys.executable, str(Path(sys.argv[0]).resolve()), CALL, function.__name__, json.dumps(given)]
        plain = {key: value for key, value in given.items() if isinstance(value, str | int | float)}
        return Job(
            name=name,
            setting={"controller": controller, "ranks": ranks, **plain},
            command=[*launcher(controller, ranks), *before, *words],
        )

    def measure(
        self, jobs: Sequence[Job], rounds: int = 1, *, limit_s: float = 900, launched: Launch | None = None
    ) -> list[Run]:
        """Launch the jobs in turn, and return the runs with all rounds; the others are only reported.

        Args:
            jobs: to measure.
            rounds: launches of each.
            limit_s: seconds that a launch may take.
            launched: launches a job once; by default on this machine.
        """
        runs = measure(jobs, rounds, launched or functools.partial(launch, limit_s=limit_s), log=_log)
        self._keep(runs)
        return [run for run in runs if len(run.rounds) == rounds]

    def record(self, name: str, setting: Mapping[str, Any], figures: Mapping[str, Figure]) -> None:
        """Keep figures that this process measured itself."""
        taken = Round(figures=dict(figures), foreign_cores=0.0)
        self._keep([Run(name=name, setting=dict(setting), command="", rounds=[taken])])

    def exit_code(self) -> int:
        """Return 1 if a launch failed, else 0."""
        return int(any(run.skipped is not None for run in self._runs))

    def _keep(self, runs: Sequence[Run]) -> None:
        self._runs += runs
        if self._options.out is not None:
            options = {key: value for key, value in vars(self._options).items() if key != "out"}
            name = Path(sys.argv[0]).stem
            found = Comparison(shlex.join(["python", f"benchmarks/{name}.py", *sys.argv[1:]]), options, self._runs)
            write_results(replace(new_results(), comparisons={name: found}), self._options.out)


def _is_first() -> bool:
    """Return whether this is rank 0, in an elastic job by its session."""
    try:
        return current().world.primary
    except LaunchError:
        return detect_environment().rank == 0


def started(**arguments: Any) -> tuple[Any, Any, Callable[[Any], list[Any]]]:
    """Initialize hvdtrain; return its backend, one without any exchange, and a function that gathers from all ranks."""
    import hvdtrain

    hvdtrain.init(**arguments)
    from hvdtrain.backends.protocol import gather
    from hvdtrain.backends.select import current_exchange
    from hvdtrain.backends.single import SingleBackend

    backend = current_exchange()
    return backend, SingleBackend(current()), functools.partial(gather, backend)


def print_times(
    title: str, times: Mapping[str, Sequence[float]], base: str, notes: Mapping[str, str] | None = None
) -> None:
    """Print a line for each side, with the median and the range of its ratios to `base` in the same rounds.

    Args:
        title: the setting.
        times: milliseconds of each side per round.
        base: the side that the others are divided by.
        notes: more of a side.
    """
    for side, values in times.items():
        line = f"{title}  {side:25} {np.median(values):9.2f} ms"
        if base in times:
            ratios = np.array(values) / np.array(times[base])
            line += f"   {np.median(ratios):.3f} of {base} ({ratios.min():.3f} .. {ratios.max():.3f})"
        _log(f"{line}   {(notes or {}).get(side, '')}".rstrip())
