"""Whether a rank goes on, and where it stands: its phases, its stack, its signs of life."""

import gc
import os
import sys
import threading
import time
import weakref

import pytest

from hvdtrain.runtime.hang.position import Position, current_position, position_of, show_own_stacks
from hvdtrain.runtime.hang.progress import ProgressWatch, shows_work
from hvdtrain.runtime.hang.signs import Activity, Signs, SignsOfLife

T = 300.0


class Rank:
    """A rank whose clock, place and signs of life are set by hand."""

    def __init__(self):
        self.now, self.position, self.signs = 0.0, Position("code", None, None, ""), Signs()
        self.activity = Activity()
        self.watch = ProgressWatch(
            self.activity, T, 3600.0, locate=lambda: self.position, signs=self, clock=lambda: self.now
        )

    def look(self):
        return self.signs

    def forget(self):
        pass

    def idle_after(self, seconds):
        """Return for how long it counts as idle, looked at every second."""
        for _ in range(int(seconds)):
            self.now += 1.0
            report = self.watch.look()
        return report.idle


def frame():
    """Return a new frame."""
    return sys._getframe()


def test_a_rank_goes_on_where_its_step_its_phase_or_its_call_changes():
    rank = Rank()
    assert rank.idle_after(400) == 399.0
    rank.activity.step = 5
    assert rank.idle_after(1) == 0.0
    assert rank.idle_after(9) == 9.0
    rank.activity.phase = "callbacks"
    assert rank.idle_after(1) == 0.0
    rank.position = Position("code", frame(), None, "")
    assert rank.idle_after(3) == 2.0
    rank.position = Position("code", frame(), None, "")
    assert rank.idle_after(1) == 0.0


@pytest.mark.parametrize(
    ("phase", "reads", "state", "signs", "believed_s"),
    [
        ("callbacks", 9, "code", Signs(computes=True), 0),  # an endless loop
        ("callbacks", 9, "code", Signs(moves_data=True), 12 * T),  # a callback that copies a file
        ("", 0, "code", Signs(helpers_compute=True), 12 * T),  # a command that a script runs
        ("", 0, "code", Signs(), 0),
        ("loading", 0, "code", Signs(), 3600),  # its first batch
        ("loading", 1, "code", Signs(), 3600),
        ("loading", 9, "code", Signs(), 0),  # a reader that is blocked
        ("loading", 9, "code", Signs(computes=True), 12 * T),
        ("", 0, "reading", Signs(helpers_compute=True), 12 * T),
        ("", 0, "reading", Signs(), 0),
        ("saving", 9, "code", Signs(), 12 * T),  # to a disk that takes long
        ("saving", 9, "exchange", Signs(moves_data=True), 0),  # for the others to be ready
        ("saving", 9, "collective", Signs(), 0),
        ("compiling", 9, "function", Signs(computes=True), 12 * T),
        ("step", 9, "function", Signs(computes=True), 12 * T),
        ("step", 9, "collective", Signs(moves_data=True, helpers_compute=True), 0),  # readers fill their buffers
        ("step", 9, "exchange", Signs(True, True, True), 0),
    ],
)
def test_how_long_a_rank_is_believed_to_work(phase, reads, state, signs, believed_s):
    rank = Rank()
    rank.activity.phase, rank.activity.reads, rank.signs = phase, reads, signs
    rank.position = Position(state, frame(), None, "")
    rank.watch.look()
    idle = rank.idle_after(12 * T + 700)
    # Signs are looked at every few seconds.
    assert idle == pytest.approx(12 * T + 700 - believed_s, abs=4.0)


def test_a_watch_that_was_kept_waiting_itself_concludes_little():
    rank = Rank()
    rank.watch.look()
    rank.now += 2 * T
    assert rank.watch.look().idle == pytest.approx(0.15 * T)


def test_a_debugger_is_never_idle():
    rank = Rank()
    rank.position = Position("debugger", None, None, "")
    assert rank.idle_after(20_000) == 0.0


def test_what_is_noted_ends_with_the_training():
    activity = Activity()

    def fails():
        with activity.training():
            activity.phase, activity.step = "callbacks", 3
            with activity.during("saving"):
                assert activity.phase == "saving"
            assert activity.phase == "callbacks"
            raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        fails()
    assert (activity.phase, activity.step) == ("", None)


def test_a_batch_may_take_as_long_as_others_did():
    rank = Rank()
    rank.activity.phase = "loading"
    for seconds in (1.0, 400.0, 2.0):
        rank.activity.note_read(seconds)
    rank.position = Position("code", frame(), None, "")
    rank.watch.look()
    assert rank.idle_after(1500) == pytest.approx(1500 - 800, abs=2.0)


def test_only_work_in_the_phases_that_take_long_is_believed_by_its_computing():
    busy = Signs(computes=True)
    assert not shows_work(busy, "code", "callbacks")
    assert all(shows_work(busy, "code", phase) for phase in ("loading", "compiling", "evaluation"))


# --- what is read from stacks and from the system ----------------------------------------------------------------


def test_the_users_own_line_is_named():
    assert current_position().where.startswith("test_progress.py:")
    assert current_position().state == "code"


def test_the_users_own_line_is_named_where_a_librarys_thread_waits():
    begun, over = threading.Event(), threading.Event()

    def wait():
        begun.set()
        over.wait(20)

    scope = {"__name__": "horovod.tensorflow.mpi_ops", "call": wait}
    exec(compile("def allreduce(name='grad.0'):\n    call()", "/lib/python3.11/made.py", "exec"), scope)
    wait.__code__ = wait.__code__.replace(co_filename="/lib/python3.11/waits.py")
    worker = threading.Thread(target=scope["allreduce"])
    worker.start()
    begun.wait(20)
    found = current_position()
    over.set()
    worker.join()
    assert found.state == "collective"
    assert found.where.startswith("test_progress.py:")


def test_a_look_from_a_watching_thread_leaves_nothing_that_holds_what_was_at_work():
    """An iterator that lives on until Python ends waits for ever for the Python code that it runs."""

    class Held:
        pass

    found = []

    def work():
        held = Held()
        found.append(weakref.ref(held))
        looks = threading.Thread(target=current_position, name="hvdtrain-watchdog")
        looks.start()
        looks.join()

    gc.collect()
    gc.disable()
    try:
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert found[0]() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_the_frames_of_others_are_made(monkeypatch, enabled):
    """Python 3.11 crashes, or waits for ever, where a finalizer lets the thread go on that is looked at."""
    collects, look = [], sys._current_frames

    def noting():
        collects.append(gc.isenabled())
        return look()

    monkeypatch.setattr(sys, "_current_frames", noting)
    if not enabled:
        gc.disable()
    try:
        current_position()
        show_own_stacks(0)
        assert collects == [False, False]
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def in_namespace(module, name, call):
    """Call `call` from a function of that module and name."""
    scope = {"__name__": module, "call": call}
    exec(compile(f"def {name}(self=None, name='grad.0'):\n    return call()", "/lib/python3.11/made.py", "exec"), scope)
    return scope[name]()


@pytest.mark.parametrize(
    ("module", "name", "state"),
    [
        ("horovod.common.basics", "init", "collective"),
        ("hvdtrain.runtime.control.rooted", "_exchange", "exchange"),
        ("tensorflow.python.ops.gen_dataset_ops", "iterator_get_next", "reading"),
        ("tensorflow.python.eager.polymorphic_function.atomic_function", "call_flat", "function"),
        ("pdb", "interaction", "debugger"),
        ("mymodule", "anything", "code"),
    ],
)
def test_states_are_read_from_the_stack(module, name, state):
    assert position_of(in_namespace(module, name, sys._getframe)).state == state


def test_a_compiled_function_is_looked_through_for_collectives():
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.runtime.hang import position

    @tf.function
    def double(x):
        return tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), [x])

    inner = double.get_concrete_function(tf.constant(1))._inference_function
    assert position._collectives_in(inner) == []


def test_signs_of_life():
    signs, computed, stop = SignsOfLife(), threading.Event(), threading.Event()
    assert signs.look() == Signs()
    time.sleep(0.3)
    assert signs.look() == Signs()
    end = time.thread_time() + 0.2
    while time.thread_time() < end:
        os.stat("/")
    assert signs.look() == Signs(computes=True)

    def compute():
        while time.thread_time() < 0.2:
            os.stat("/")
        computed.set()
        stop.wait()

    helper = threading.Thread(target=compute)
    helper.start()
    assert computed.wait(60)
    seen = signs.look()
    stop.set()
    helper.join()
    assert seen.helpers_compute
    signs.look()
    with open(__file__, "rb") as file:
        for _ in range(30):
            file.seek(0)
            file.read()
    assert signs.look().moves_data
