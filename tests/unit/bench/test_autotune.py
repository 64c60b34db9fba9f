"""Which settings the search keeps, on machines whose times are known; no ranks are started."""

import os

import pytest

from hvdtrain.bench.autotune import CANDIDATES, WORTH, autotune
from hvdtrain.bench.engine import Answer, Job, LaunchFailed
from hvdtrain.bench.results import read_results
from hvdtrain.cli.main import main
from hvdtrain.runtime.tuning import EXCHANGE_DEFAULTS

JOB = Job(name="horovod-mpi", setting={"model": "lm"}, command=["bench", "side"])
YIELD, CYCLE, FUSION = CANDIDATES


class Machine:
    """Takes 100 ms for a step, and as many more or fewer as the settings cost."""

    def __init__(self, costs, foreign=0.0, drift=0.0):
        self.asked = []
        self._costs, self._foreign, self._drift = costs, foreign, drift

    def __call__(self, job):
        settings = job.environ
        self.asked.append(dict(settings))
        cost = sum(self._costs.get((name, value), 0.0) for name, value in settings.items())
        milliseconds = 100.0 + cost - self._drift * len(self.asked)
        return Answer({"windows_ms": [milliseconds - 1, milliseconds, milliseconds + 7]}, {}, self._foreign)


def tuned(mpi=True, **machine):
    machine = Machine(**machine)
    logged = []
    return autotune(JOB, machine, logged.append, mpi=mpi), machine, logged


def test_the_defaults_stay_where_nothing_is_faster():
    found, machine, logged = tuned(costs={(YIELD, "0"): 50.0})
    assert found.settings == {}
    assert len(machine.asked) == len(logged) == 6
    assert machine.asked[0] == EXCHANGE_DEFAULTS
    assert logged[0] == "   100.00 ms a step  the defaults"
    assert logged[1] == f"   150.00 ms a step  {YIELD}=0"


def test_what_is_faster_is_kept_while_the_rest_is_tried_and_compared_anew_at_the_end():
    found, machine, _ = tuned(costs={(CYCLE, "0.5"): -10.0, (FUSION, "67108864"): -20.0, (FUSION, "4194304"): -5.0})
    assert found.settings == {CYCLE: "0.5", FUSION: "67108864"}
    assert found.saved == pytest.approx(0.3)
    best = EXCHANGE_DEFAULTS | found.settings
    assert machine.asked[-2:] == [EXCHANGE_DEFAULTS, best]
    runs = {run.name: run for run in found.runs}
    assert len(runs["the defaults"].rounds) == 2
    assert runs[f"{CYCLE}=0.5"].command == f"{CYCLE}=0.5 bench side"


def test_savings_that_are_too_small_to_be_told_from_noise_are_left():
    assert tuned(costs={(CYCLE, "2"): -99.0 * WORTH})[0].settings == {}


def test_a_machine_that_grows_faster_meanwhile_does_not_change_the_settings():
    """The result is that of the last comparison, whose launches took turns."""
    found, machine, _ = tuned(costs={}, drift=2.0)
    assert len(machine.asked) > 6, "something looked faster"
    assert found.settings == {}


def test_under_gloo_nothing_of_mpi_is_tried():
    _, machine, _ = tuned(mpi=False, costs={})
    assert {asked[YIELD] for asked in machine.asked} == {"1"}
    assert len(machine.asked) == 5


def test_other_programs_make_it_unbelievable():
    assert tuned(costs={}, foreign=0.1)[0].noise is None
    assert tuned(costs={}, foreign=0.6)[0].noise == 0.6


# -- the command --


@pytest.fixture
def machine(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return lambda machine: monkeypatch.setattr("hvdtrain.cli.bench.launch", lambda job, *, limit_s: machine(job))


def test_what_was_found_is_written_to_be_sourced_and_reported(machine, capsys, tmp_path, monkeypatch):
    machine(Machine({(CYCLE, "0.5"): -10.0}))
    monkeypatch.setenv(CYCLE, "7")  # of an earlier search: it is not what the defaults are
    assert main(["bench", "--autotune", "--ranks", "2", "--model", "mlp"]) == 0
    assert CYCLE not in os.environ
    assert (tmp_path / "bench" / "exchange.env").read_text().splitlines() == [
        "# python -m hvdtrain bench --autotune: mlp on 2 ranks, horovod-mpi;",
        "# a step took 10% less time than with the defaults.",
        "export HOROVOD_CYCLE_TIME=0.5",
    ]
    assert capsys.readouterr().out.endswith("to train so  source bench/exchange.env\n")
    (folder,) = (path for path in (tmp_path / "bench").iterdir() if path.is_dir())
    assert read_results(folder).comparisons["autotune"].options["model"] == "mlp"
    report = (folder / "report.md").read_text()
    assert "| HOROVOD_CYCLE_TIME=0.5 | mlp, 2 ranks, batch 64 | windows_ms | 90 | 90 .. 90 | 2 |" in report
    assert "HOROVOD_CYCLE_TIME=0.5 mpirun" in report


@pytest.mark.parametrize(
    ("known", "code", "said"),
    [
        (Machine({}), 0, "the defaults are as fast as anything that was tried"),
        (Machine({(CYCLE, "0.5"): -10.0}, foreign=0.5), 1, "took 0.50 cores meanwhile: no settings were written"),
    ],
)
def test_no_settings_are_written_where_none_are_better_or_it_was_too_noisy(
    machine, capsys, tmp_path, known, code, said
):
    machine(known)
    assert main(["bench", "--ranks", "2", "--autotune"]) == code
    assert said in capsys.readouterr().out
    assert not (tmp_path / "bench" / "exchange.env").exists()


def test_the_command_explains_what_cannot_be_timed(machine, capsys):
    def nothing(job):
        raise LaunchFailed("mpirun: No such file or directory")

    machine(nothing)
    assert main(["bench", "--autotune", "--ranks", "2"]) == 2
    assert "horovod-mpi could not be timed: mpirun: No such file or directory" in capsys.readouterr().err
    assert main(["bench", "--autotune", "--ranks", "3"]) == 2
    assert "A batch of 64 samples does not divide among 3 ranks." in capsys.readouterr().err
