import functools
import io
import re
import sys
import threading
import time
import traceback
import weakref
from dataclasses import dataclass, field
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from hvdtrain.config.errors import ConfigError, on_command_line, opt
from hvdtrain.runtime.consequences import is_consequence
from hvdtrain.runtime.control.channel import ControlChannel
from hvdtrain.runtime.failures import EXIT_HANG, FailFast, Grace, ScriptExit, describe, filtered, show_failure
from hvdtrain.runtime.link import Watchdog
from tests.unit.threaded_ranks import as_ranks, place

QUICK = Grace(cause=1.0, same=0.5, silent=0.0, output=0.0)


class HorovodInternalError(RuntimeError):
    """As Horovod names it."""


class OpError(Exception):
    """As TensorFlow names it."""


class UnknownError(OpError):
    """As TensorFlow names it."""


COMPUTED_AT_ONCE = (
    "{{function_node __wrapped__HorovodAllreduce_device_/job:localhost/replica:0/task:0/device:CPU:0}} Horovod has "
    "been shut down. This was caused by an exception on one of the ranks. [Op:HorovodAllreduce] name: "
)
IN_A_GRAPH = """Graph execution error:

Detected at node {node} defined at (most recent call last):
  File "/home/me/train.py", line 21, in <module>

  File "/home/me/train.py", line 14, in f
{frames}
{text}
\t [[{{{{node {node}}}}}]] [Op:__inference_f_42]"""
FRAMES = """
  File "/lib/horovod/tensorflow/mpi_ops.py", line 130, in _allreduce

  File "<string>", line 111, in horovod_allreduce
"""
NODE_ALONE = (
    "{{function_node __inference_<lambda>_223}} Horovod has been shut down. This was caused by an exception on one of "
    "the ranks.\n\n\t [[{{node dp.callbacks.agreement.252437e7}}]] [Op:__inference_<lambda>_223]"
)
"""As TensorFlow 2.21 words the errors of Horovod's ops."""


class Ended(Exception):
    """The job, by an abort that the test survives."""


@dataclass
class Ending:
    """A channel that notes how it is ended."""

    channel: ControlChannel
    reported: list[str] = field(default_factory=list)

    def __getattr__(self, name):
        return getattr(self.channel, name)

    def abort(self, code):
        raise Ended(code)


def fail(errors, delays=None, grace=QUICK):
    """Let each rank fail with its error, if it has one, after its delay; return what each showed, and its code."""

    def body(channel):
        shown = io.StringIO()
        channel.barrier(10)
        if errors[channel.rank] is None:
            return "", None
        time.sleep((delays or {}).get(channel.rank, 0.0))
        try:
            raise errors[channel.rank]
        except BaseException as error:
            with pytest.raises(Ended) as ended:
                FailFast(grace, shown).fail(Ending(channel), place(channel.rank, channel.size), error)
        return shown.getvalue(), ended.value.args[0]

    outcomes = as_ranks(len(errors), body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [shown for shown, _ in outcomes], [code for _, code in outcomes]


def test_the_cause_is_shown_and_its_consequences_are_not():
    errors = [HorovodInternalError("shut down"), ValueError("the cause"), UnknownError(COMPUTED_AT_ONCE)]
    shown, codes = fail(errors)
    assert shown[0] == shown[2] == ""
    assert shown[1].startswith("rank 1 (host1) failed:\nTraceback")
    assert shown[1].endswith("ValueError: the cause\n")
    assert codes == [1, 1, 1]


def test_the_cause_is_shown_although_its_consequences_came_long_before():
    """The rank that fails shuts Horovod down, and then has files to write before its own error is out."""
    errors = [UnknownError(COMPUTED_AT_ONCE), ValueError("the cause"), HorovodInternalError("shut down")]
    began = time.monotonic()
    shown, codes = fail(errors, {1: 1.5}, Grace(cause=8.0, same=0.5, silent=0.0, output=0.0))
    assert shown[0] == shown[2] == ""
    assert shown[1].endswith("ValueError: the cause\n")
    assert codes == [1, 1, 1]
    assert time.monotonic() - began < 6.0


def test_a_rank_of_which_nothing_is_heard_is_named_and_not_the_one_that_lost_it():
    shown, codes = fail([HorovodInternalError("reset by peer"), None, in_a_graph("gloo: reset by another peer")])
    assert shown[0].startswith("rank 0 (host0) was cut off from rank 1, of which nothing was heard: killed, or")
    assert shown[0].endswith("reset by peer\n")
    assert shown[1:] == ["", ""]
    assert codes == [1, None, 1]


@pytest.mark.parametrize(
    ("errors", "shown", "codes"),
    [
        (
            [UnknownError(COMPUTED_AT_ONCE), ScriptExit(3, "train.py:12")],
            ["", "hvdtrain: error: The script called sys.exit(3) at train.py:12. [rank 1 (host1)]\n"],
            [1, 3],
        ),
        (
            [ScriptExit(75, "train.py:12"), UnknownError(COMPUTED_AT_ONCE)],
            ["hvdtrain: The script called sys.exit(75) at train.py:12. [rank 0 (host0)]\n", ""],
            [75, 1],
        ),
        (
            [ConfigError(f"{opt('batch', 7)} does not divide") for _ in range(3)],
            ["hvdtrain: error: batch=7 does not divide\n", "", ""],
            [2, 2, 2],
        ),
        (
            [HorovodInternalError("x"), ConfigError("no such file")],
            ["", "hvdtrain: error: no such file [rank 1 (host1)]\n"],
            [1, 2],
        ),
        ([KeyboardInterrupt(), KeyboardInterrupt()], ["hvdtrain: interrupted\n", ""], [130, 130]),
    ],
    ids=["sys.exit", "a new start", "of all ranks", "of one rank", "Ctrl-C"],
)
def test_mistakes_are_shown_once_and_have_their_codes(errors, shown, codes):
    assert fail(errors) == (shown, codes)


def test_different_errors_are_all_shown():
    shown, _ = fail([ValueError("one"), ValueError("two")])
    assert "one" in shown[0]
    assert "two" in shown[1]


def test_consequences_without_a_cause_are_shown_once_and_soon():
    began = time.monotonic()
    shown, _ = fail([HorovodInternalError(f"lost by {rank}") for rank in range(3)], grace=Grace(cause=20.0, silent=0.0))
    assert ["lost" in text for text in shown] == [True, False, False]
    assert "rank 0 (host0) was cut off, as all other ranks were:" in shown[0]
    assert time.monotonic() - began < 10.0


@pytest.mark.parametrize("control", [ControlChannel(), None])
@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("bad"), 2, "hvdtrain: error: bad\n"),
        (KeyboardInterrupt(), 130, "hvdtrain: interrupted\n"),
        (ValueError("bug"), 1, "ValueError: bug\n"),
    ],
)
def test_alone_it_shows_the_error_and_returns_the_code(control, error, code, text, capsys):
    fail_here = show_failure if control is None else functools.partial(FailFast().fail, control)
    assert fail_here(place(0, 1), error) == code
    assert capsys.readouterr().err == text


def test_a_place_that_is_not_known_is_not_named(capsys):
    assert show_failure(None, ConfigError("bad")) == 2
    assert capsys.readouterr().err == "hvdtrain: error: bad\n"


def test_a_closed_stream_does_not_hide_the_exit_code():
    stream = io.StringIO()
    stream.close()
    assert show_failure(place(0, 1), ValueError("x"), stream=stream) == 1


def mpi_error(text):
    return type("Exception", (RuntimeError,), {"__module__": "mpi4py.MPI"})(text)


def in_a_graph(text, frames=FRAMES):
    return UnknownError(IN_A_GRAPH.format(node="while/mine", frames=frames, text=text))


def test_consequences_are_told_by_the_type_of_the_error_and_the_op_that_raised_it():
    wrapped = RuntimeError("in the callback")
    wrapped.__cause__ = HorovodInternalError("x")
    assert is_consequence(HorovodInternalError("x"))
    assert is_consequence(UnknownError(COMPUTED_AT_ONCE))
    assert is_consequence(UnknownError(NODE_ALONE))
    assert not is_consequence(UnknownError(NODE_ALONE.replace("dp.callbacks.agreement.252437e7", "EagerPyFunc")))
    assert is_consequence(wrapped)
    assert is_consequence(in_a_graph("[gloo/transport/tcp/pair.cc:589] Read error: Connection reset by peer"))
    assert is_consequence(in_a_graph("any other words"))
    assert is_consequence(mpi_error("MPI_ERR_PROC_FAILED"))
    assert not is_consequence(OpError(COMPUTED_AT_ONCE.replace("Horovod has been shut down", "Incompatible shapes")))
    assert not is_consequence(UnknownError("matrix size-incompatible"))
    assert not is_consequence(ValueError("horovod is misspelt"))


def test_a_session_names_the_op_itself():
    error = UnknownError("Horovod has been shut down")
    error.op = SimpleNamespace(type="HorovodAllreduce")
    assert is_consequence(error)
    error.op = SimpleNamespace(type="EagerPyFunc")
    assert not is_consequence(error)


@pytest.mark.parametrize("text", ["Horovod", "gloo", "MPI_", "NCCL", FRAMES])
def test_an_error_of_the_users_that_mentions_a_transport_is_a_cause(text):
    assert not is_consequence(in_a_graph(f"RuntimeError: {text} is not mine\n{FRAMES}", frames=""))

    @tf.function
    def step(x):
        return tf.py_function(lambda x: raise_(RuntimeError(f"no {text} here")), [x], tf.float32)

    with pytest.raises(tf.errors.UnknownError) as raised:
        step(tf.constant(1.0))
    assert text in str(raised.value)
    assert not is_consequence(raised.value)


def raise_(error):
    raise error


def test_what_is_raised_while_a_consequence_is_handled_is_one_too():
    def cleaned_up(**how):
        try:
            try:
                raise UnknownError(COMPUTED_AT_ONCE)
            except UnknownError:
                raise OSError("file is closed") from how.get("cause")
        except OSError as error:
            return error

    assert not is_consequence(cleaned_up(cause=None))  # `from None` says that it has nothing to do with it
    assert is_consequence(cleaned_up(cause=HorovodInternalError("x")))


def test_an_error_of_the_cleaning_up_after_a_consequence_is_one_too():
    def cleaned_up():
        try:
            raise UnknownError(COMPUTED_AT_ONCE)
        finally:
            raise OSError("file is closed")

    with pytest.raises(OSError, match="file is closed") as raised:
        cleaned_up()
    assert is_consequence(raised.value)


def test_the_watchdog_ends_a_process_that_hangs_after_a_failure(capsys):
    ended = []

    def body(channel):
        if channel.rank == 1:
            return channel.report_failure("text")
        policy = FailFast(Grace(hanging=0.5), end=lambda code: ended.append((code, time.monotonic())))
        watchdog = Watchdog(channel, policy, interval=0.05)
        started = time.monotonic()
        watchdog.start()
        while not ended and time.monotonic() < started + 10:
            time.sleep(0.05)
        watchdog.stop()
        return ended[0][0], ended[0][1] - started > 0.5

    assert as_ranks(2, body) == [(1, True), None]
    assert "rank 0 still ran 0.5 s after rank 1 failed" in capsys.readouterr().err


def test_a_hang_is_told_to_all_ranks_and_ends_the_job(capsys):
    said = []

    class Aborting:
        """The channel of a rank, of which the end of the job is only noted."""

        def __init__(self, channel):
            self.report_failure = channel.report_failure

        def abort(self, code):
            said.append(code)

    def body(channel):
        if channel.rank == 1:
            FailFast(Grace(stacks=0.1)).hung(
                Aborting(channel), place(1, 2), f"It hangs: raise {opt('hang_timeout')}.", lambda: said.append("stacks")
            )
            return None
        watchdog = Watchdog(channel, FailFast(Grace(hanging=0.1), end=said.append), interval=0.02)
        watchdog.start()
        while 1 not in said:
            time.sleep(0.02)
        return None

    assert as_ranks(2, body) == [None, None]
    assert sorted(map(str, said)) == ["1", str(EXIT_HANG), "stacks"]
    shown = capsys.readouterr().err
    assert "hvdtrain: error: It hangs: raise hang_timeout. [rank 1 (host1)]" in shown
    assert re.search(r"rank 0 stands at\n(.*\n)+.*in body", shown), shown


def test_ranks_that_write_one_file_are_told_so():
    """HDF5 says that a file is locked, and not by whom."""
    error = BlockingIOError(11, "Unable to synchronously create file (unable to lock file, errno = 11)")
    assert describe(error).endswith("Each rank writes this file: let one do so, with `if hvdtrain.rank() == 0:`.")
    assert "Each rank" not in describe(BlockingIOError(11, "no data"))


def test_a_broken_link_is_told_once_by_the_ranks_of_a_host_and_ends_them(capsys):
    ended = []

    class Ending:
        def __init__(self, channel):
            self.rank, self.failures, self.report_failure = channel.rank, channel.failures, channel.report_failure

        def abort(self, code):
            ended.append((self.rank, code))

    def body(channel):
        FailFast(Grace(same=5)).broken_link(
            Ending(channel), place(channel.rank, 2), f"Broken: see {opt('link_timeout')}."
        )

    as_ranks(2, body)
    assert sorted(ended) == [(0, 1), (1, 1)]
    assert capsys.readouterr().err.count("error: Broken: see link_timeout. [rank 0 (host0)]") == 1


class Counting:
    """Counts its looks."""

    ends_job = False

    def __init__(self):
        self.looks = 0

    def look(self, now):
        self.looks += 1


def test_a_watch_that_fails_again_and_again_is_not_looked_at_any_more(capsys):
    class Mistaken(Counting):
        def look(self, now):
            super().look(now)
            raise KeyError("a mistake")

    def body(channel):
        watchdog, mistaken, other = Watchdog(channel, FailFast(), interval=0.01), Mistaken(), Counting()
        watchdog.start()
        watchdog.add(mistaken)
        watchdog.add(other)
        await_that(lambda: other.looks > 6)
        watchdog.stop()
        return mistaken.looks

    assert as_ranks(2, body) == [3, 3]
    assert capsys.readouterr().err.count("Mistaken watches no more") == 2


@pytest.fixture
def many_thread_switches():
    """Threads take turns a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("capsys", "many_thread_switches")
def test_watches_that_are_added_while_others_fail_are_all_kept():
    """One thread adds them while another removes those that fail."""

    class FailsLater(Counting):
        def look(self, now):
            super().look(now)
            if threading.current_thread().name == "hvdtrain-watchdog":
                raise KeyError("a mistake")

    def body(channel):
        watchdog = Watchdog(channel, FailFast(), interval=0.001)
        watchdog.start()
        good, failing = [Counting() for _ in range(1500)], [FailsLater() for _ in range(1500)]
        for pair in zip(good, failing, strict=True):
            for watch in pair:
                watchdog.add(watch, interval=0.001)
        before = [watch.looks for watch in good]
        await_that(lambda: good[-1].looks > before[-1] + 2)
        watchdog.stop()
        return (
            sum(watch.looks == seen for watch, seen in zip(good, before, strict=True)),
            sum(watch.looks > 4 for watch in failing),
        )

    assert as_ranks(2, body) == [(0, 0)] * 2, "(good ones that were lost, failing ones that came back)"


def await_that(condition):
    """Wait until `condition` holds."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_stopped_watchdog_ends_nothing():
    ended = []

    def body(channel):
        watchdog = Watchdog(channel, FailFast(Grace(hanging=0.2), end=ended.append), interval=0.02)
        watchdog.start()
        channel.barrier(10)
        if channel.rank == 0:
            channel.report_failure("text")
        time.sleep(0.1)
        watchdog.stop()
        watchdog.stop()
        time.sleep(0.3)

    assert as_ranks(2, body) == [None, None]
    assert ended == []


def test_a_watchdog_over_one_process_does_nothing():
    watchdog = Watchdog(ControlChannel(), FailFast())
    watchdog.start()
    watchdog.stop()


def test_a_watchdog_that_stops_gives_its_watches_up():
    """What a watch last saw may hold an iterator, which must end before Python does."""

    def body(channel):
        watchdog, watch = Watchdog(channel, FailFast(), interval=0.02), Counting()
        watchdog.start()
        watchdog.add(watch)
        seen = weakref.ref(watch)
        del watch
        time.sleep(0.1)
        assert seen() is not None
        watchdog.stop()
        assert seen() is None

    assert as_ranks(2, body) == [None, None]


def test_another_policy_may_let_the_job_go_on():
    seen = []

    class GoOn:
        def fail(self, control, environment, error):
            return 0

        def others_failed(self, control, failed, stopped):
            seen.append((control.rank, list(failed)))

    def body(channel):
        watchdog = Watchdog(channel, GoOn(), interval=0.02)
        watchdog.start()
        if channel.rank == 1:
            channel.report_failure("text")
        channel.barrier(10)
        time.sleep(0.3)
        channel.barrier(10)
        watchdog.stop()

    assert as_ranks(3, body) == [None] * 3
    assert sorted(seen) == [(0, [1]), (2, [1])]


# --- frames of libraries ---


def raised(code, file="/home/me/train.py"):
    """The error of a script."""
    try:
        exec(compile(code, file, "exec"), {})
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


IN_KERAS = "import keras\nkeras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]).compute_output_shape(3)"
IN_A_FUNCTION = """
import tensorflow as tf
@tf.function
def f(x): return tf.cast(x, "float32") + 1.0
f(tf.constant("a"))
"""
IN_TRACING = "import tensorflow as tf\ntf.function(lambda x: tf.reshape(x, [3]))(tf.zeros([2]))"


@pytest.mark.parametrize("code", [IN_KERAS, IN_A_FUNCTION, IN_TRACING])
def test_frames_of_libraries_are_left_out_as_keras_leaves_them_out(code):
    keras.config.disable_traceback_filtering()  # of Keras' own functions
    try:
        error = raised(code)
        whole = describe(error)
    finally:
        keras.config.enable_traceback_filtering()
    shown = describe(error)
    assert "/keras/" in whole or "/tensorflow/" in whole
    assert not re.search(r'File "[^"]*/(keras|tensorflow|hvdtrain)/', shown)
    assert 'File "/home/me/train.py"' in shown
    assert str(error).splitlines()[-1].strip() in shown
    assert shown.endswith("keras.config.disable_traceback_filtering().")
    assert len(shown) < len(whole)


@pytest.mark.parametrize("code", ["1 / 0", "import hvdtrain.config.options as o\no.limits_of(3)"])
def test_errors_of_scripts_and_of_our_own_code_are_shown_whole(code):
    error = raised(code)
    assert describe(error) == "".join(traceback.format_exception(error)).rstrip()


def test_what_no_script_takes_part_in_is_shown_whole():
    text = f'''Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
  File "{keras.__path__[0]}/src/a.py", line 3, in a
    raise ValueError("b")
ValueError: b'''
    assert filtered(text) == text


def test_an_error_of_usage_names_the_line_of_the_script(capsys):
    def fit(batch):
        if batch > 1:
            raise ConfigError("bad")

    script = compile("fit(1)\n\ndef again():\n    fit(2)\n\nagain()", "/home/me/train.py", "exec")
    with pytest.raises(ConfigError) as met:
        exec(script, {"__name__": "__main__", "fit": fit})
    assert show_failure(None, met.value) == show_failure(None, met.value, wording=on_command_line) == 2
    assert capsys.readouterr().err == "hvdtrain: error: bad [train.py:4]\nhvdtrain: error: bad\n"
