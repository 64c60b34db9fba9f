"""Ctrl-C and SIGTERM: what is said, by whom, and how the process ends."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest

from hvdtrain.runs.folder import RunFolder
from hvdtrain.runs.resume import interrupted, launch_command
from hvdtrain.runtime.failures import describe, show_failure
from hvdtrain.runtime.interrupts import Interrupted, InterruptWatch, show_interrupt
from hvdtrain.runtime.launchers import place
from hvdtrain.runtime.stopping import Stopped


def environment(rank=0, size=1, launcher="mpirun", controller="mpi"):
    return place(launcher=launcher, controller=controller, world=(rank, size), local=(rank, size), job_id="j")


class Watched:
    """A watch whose end is noted down, not taken."""

    def __init__(self, rank=0, size=2, failed=False, trains=False):
        self.codes, self.stops = [], []
        self.place = environment(rank, size)
        self.ended = threading.Event()

        def stop(number):
            self.stops.append(number)
            return trains

        self.watch = InterruptWatch(lambda: self.place, lambda: "stopped at step 3", lambda: failed, self._end, stop)

    def _end(self, code):
        self.codes.append(code)
        self.ended.set()

    def sends(self, number):
        with self.watch:
            os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGUSR1, 75)])
@pytest.mark.parametrize(
    ("rank", "failed", "said"), [(0, False, "hvdtrain: stopped at step 3\n"), (1, False, ""), (0, True, "")]
)
def test_of_several_ranks_the_first_says_it_and_all_end(capsys, number, code, rank, failed, said):
    job = Watched(rank, failed=failed)
    job.sends(number)
    assert (job.codes, capsys.readouterr().err) == ([code], said)


def test_the_rank_that_is_the_first_by_now_says_it(capsys):
    """In an elastic job rank 0 may be lost, and one rank may become two."""
    job = Watched(1, size=2)
    job.place = environment(0, 3)
    job.sends(signal.SIGTERM)
    assert (job.codes, capsys.readouterr().err) == ([75], "hvdtrain: stopped at step 3\n")
    grown = Watched(0, size=1)
    grown.place = environment(1, 2)
    grown.sends(signal.SIGINT)
    assert (grown.codes, capsys.readouterr().err) == ([130], "")


def test_a_rank_that_is_stuck_in_a_call_ends_too(capfd):
    """As within a collective: the main thread runs no Python code, and no handler."""
    job = Watched()
    with job.watch:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
        lock = threading.Lock()
        lock.acquire()
        begin = time.monotonic()
        while not job.ended.is_set() and time.monotonic() - begin < 10:
            lock.acquire(timeout=1.0)
        assert time.monotonic() - begin < 5
    assert job.codes == [75]


def test_a_process_that_is_alone_is_interrupted_as_python_does():
    job = Watched(size=1)
    with pytest.raises(Interrupted, match="stopped at step 3") as raised, job.watch:
        signal.raise_signal(signal.SIGINT)
    assert job.codes == []
    assert show_failure(environment(), raised.value) == 130
    assert describe(raised.value) == "interrupted", "the same on every rank"


def test_a_second_interrupt_ends_it_at_once():
    job = Watched(size=1)
    with job.watch:
        for _ in range(2):
            try:
                os.kill(os.getpid(), signal.SIGINT)
                job.ended.wait(2)
            except Interrupted:
                continue
        assert job.ended.wait(10)
    assert job.codes == [130]


def test_a_process_that_is_alone_is_terminated_with_a_message(capsys):
    job = Watched(size=1)
    job.sends(signal.SIGTERM)
    assert (job.codes, capsys.readouterr().err) == ([75], "hvdtrain: stopped at step 3\n")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_training_that_saves_is_asked_to_stop_and_a_second_ctrl_c_ends_it_at_once(capsys, size, first):
    job = Watched(size=size, trains=True)
    with job.watch:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)  # a launcher passes on what a scheduler has sent already
        time.sleep(0.3)
        assert (set(job.stops), job.codes) == ({first}, [])
        with contextlib.suppress(Interrupted):
            os.kill(os.getpid(), signal.SIGINT)
            assert job.ended.wait(10)
        assert job.ended.wait(10)
    assert job.codes == [130]
    assert capsys.readouterr().err == "", "whoever saves says where"


def test_a_rank_whose_job_has_failed_saves_nothing():
    job = Watched(failed=True, trains=True)
    job.sends(signal.SIGTERM)
    assert (job.stops, job.codes) == ([], [75])


def test_handlers_are_put_back_and_those_of_others_left_alone():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    with Watched().watch:
        assert signal.getsignal(signal.SIGINT) != before[signal.SIGINT]
    assert {number: signal.getsignal(number) for number in before} == before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Watched().watch:
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before[signal.SIGTERM])


@pytest.fixture
def own_handler():
    """The signals that the script's own handler of SIGUSR1 was called with."""
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    yield seen
    signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_the_script_handles_is_the_scripts_alone(own_handler):
    job = Watched(trains=True)
    with job.watch:
        os.kill(os.getpid(), signal.SIGUSR1)
    assert (own_handler, job.stops, job.codes) == ([signal.SIGUSR1], [], [])


def test_a_handler_that_the_script_sets_meanwhile_is_the_scripts_and_stays():
    job, seen = Watched(trains=True), []
    before = signal.getsignal(signal.SIGTERM)
    try:
        with job.watch:
            signal.signal(signal.SIGTERM, mine := lambda number, frame: seen.append(number))
            os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (seen, job.stops, job.codes) == ([signal.SIGTERM], [], [])


def test_a_signal_at_the_very_end_is_acted_on():
    job = Watched(trains=True)
    with job.watch:
        os.kill(os.getpid(), signal.SIGTERM)
    assert job.stops == [signal.SIGTERM]


@pytest.mark.parametrize("free", [True, False])
def test_an_event_loop_gets_its_signals_and_its_descriptor_back(own_handler, free):
    """As of asyncio: its handlers run once its descriptor is told of the signal."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    handled = [number for number in (signal.SIGINT, signal.SIGTERM) if not free]
    before = {number: signal.signal(number, lambda *_: None) for number in handled}
    assert signal.set_wakeup_fd(write) == -1
    threads = threading.active_count()
    try:
        with Watched(trains=True).watch:
            os.kill(os.getpid(), signal.SIGUSR1)
        assert os.read(read, 9) == bytes([signal.SIGUSR1])
        assert threading.active_count() == threads
    finally:
        assert signal.set_wakeup_fd(-1) == write
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(read)
        os.close(write)


def test_a_forked_process_ends_by_its_signals_and_asks_for_nothing():
    """As those of multiprocessing do, which the script or its data start."""
    job = Watched(trains=True)
    with job.watch:
        worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
        worker.start()
        worker.terminate()
        worker.join(60)
        code = worker.exitcode
        worker.kill()
    assert (code, job.stops) == (-signal.SIGTERM, [])


def test_a_training_after_one_that_was_stopped_can_be_stopped(monkeypatch):
    """As in a notebook, or a script that catches SystemExit."""
    monkeypatch.setattr("atexit.register", lambda *_: None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    again = Watched(trains=True)
    try:
        with pytest.raises(Stopped), Watched().watch:
            raise Stopped(75)
        os.kill(os.getpid(), signal.SIGTERM)  # it is told again
        again.sends(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert again.stops == [signal.SIGTERM]


def test_a_process_that_stops_in_order_keeps_its_code_when_it_is_told_again():
    script = """
import os, signal, sys
from hvdtrain.runtime.interrupts import InterruptWatch
from hvdtrain.runtime.launchers import detect_environment
from hvdtrain.runtime.stopping import Stopped
try:
    with InterruptWatch(detect_environment, str):
        raise Stopped(75)
finally:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 75


def test_another_thread_has_no_signals():
    def enter():
        with Watched().watch:
            entered.append(signal.getsignal(signal.SIGINT))

    entered = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert entered == [signal.getsignal(signal.SIGINT)]


def test_a_scripts_interrupt_shows_the_scripts_own_lines(capsys):
    def script():
        json.JSONDecoder(parse_int=interrupt).decode("1")

    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as raised:
        script()
    show_interrupt(raised.value.__traceback__)
    said = capsys.readouterr().err
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("raise KeyboardInterrupt\nKeyboardInterrupt\n")
    assert "in script\n" in said
    assert "json/decoder.py" not in said


# -- what a run says --


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.runs.resume.complete", lambda path: sorted(path.iterdir()))
    monkeypatch.setattr("hvdtrain.runs.resume.step_of", lambda path: int(path.name))
    return RunFolder(tmp_path / "my run")


def test_a_run_names_the_command_that_goes_on(folder):
    for step in (5, 7):
        (folder.checkpoints / str(step)).mkdir(parents=True)
    assert interrupted(folder, 8, 20, environment(0, 4)) == (
        "interrupted at step 8 of 20. Resume from step 7 with:\n"
        f"  mpirun -np 4 python -m hvdtrain --resume '{folder.path}'"
    )


def test_a_run_without_a_checkpoint_says_so(folder):
    said = interrupted(folder, 8, 20, environment())
    assert said.startswith("interrupted at step 8 of 20, before its first checkpoint: start the run again")


def test_a_run_that_is_trained_cannot_be_resumed(folder):
    (folder.checkpoints / "20").mkdir(parents=True)
    assert "training is complete" in interrupted(folder, 20, 20, environment())


@pytest.mark.parametrize(
    ("launcher", "controller", "command"),
    [
        ("none", "none", ""),
        ("mpirun", "mpi", "mpirun -np 2 "),
        ("horovodrun", "mpi", "horovodrun -np 2 "),
        ("horovodrun", "gloo", "horovodrun --gloo -np 2 "),
        ("mpiexec", "mpi", "mpiexec -n 2 "),
        ("srun", "mpi", "srun -n 2 "),
    ],
)
def test_the_launchers_command(launcher, controller, command):
    assert launch_command(environment(0, 2, launcher, controller)) == command


def test_the_command_of_an_elastic_job_needs_its_script():
    elastic = replace(environment(0, 2, "horovodrun", "gloo"), elastic=True)
    assert launch_command(elastic) == "horovodrun --gloo -np 2 --host-discovery-script SCRIPT "
