"""When ranks are compared, by which hashes, and who is named."""

import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdtrain
from hvdtrain.config.errors import DesyncError, on_command_line
from hvdtrain.config.training import DESYNC_EVERY
from hvdtrain.state.hashes import TensorHashes
from hvdtrain.state.named_tensors import replicated_tensor
from hvdtrain.training.callbacks.base import StepEnd
from hvdtrain.training.callbacks.desync_check import DesyncCheck

VALUES = {
    "kernel": tf.random.stateless_normal([3, 5], (1, 2)),
    "embedding": tf.cast(tf.random.stateless_normal([7], (3, 4)), tf.bfloat16),
    "slot": tf.constant([1.0, 2.0], tf.float64),
    "step": tf.constant(12, tf.int64),
    "mask": tf.constant([True, False, True]),
    "empty": tf.zeros([0, 4]),
    "optimizer/learning_rate": tf.constant(0.5),
}


class Ranks:
    """The backend of the first rank; the others hold the same hashes, but for those of `drifted`."""

    capabilities = SimpleNamespace(asynchronous=False)

    def __init__(self, size, drifted, threads=(), path="kernel"):
        self.path = path
        self.threads = threads or [2] * size
        self.processes = self.job_size = size
        self.everyone = self
        self.drifted = drifted
        self.looks = 0

    def run(self, step):
        return step()

    def all_gather(self, mine, name):
        return tf.stack([mine[0] + (rank in self.drifted) for rank in range(self.processes)])

    def gather_bytes(self, mine, *, timeout, among="job"):
        if mine.isdigit():
            return [str(threads).encode() for threads in self.threads]
        hashes = json.loads(mine)
        if "kernel" not in hashes:
            return [mine] * self.processes
        group, value = hashes[self.path]
        theirs = [{**hashes, self.path: [group, value + (rank in self.drifted)]} for rank in range(self.processes)]
        return [json.dumps(each).encode() for each in theirs]


def check_of(size=4, drifted=(), every=DESYNC_EVERY, first_step=0, apart=None, threads=(), path="kernel"):
    tensors = {name: replicated_tensor(tf.Variable(value)) for name, value in VALUES.items()}
    state = SimpleNamespace(compared_tensors=lambda: tensors)
    rule = SimpleNamespace(weights_agree=True, diverging_gradients=lambda: apart or {})
    return DesyncCheck(Ranks(size, drifted, threads, path), state, rule, first_step, every)


@pytest.mark.parametrize(
    ("every", "first_step", "looks"),
    [(20, 0, [1, 2, 4, 8, 16, 20, 40, 50]), (20, 9, [10, 11, 13, 17, 20, 25, 40, 50]), (1, 45, [46, 47, 48, 49, 50])],
)
def test_ranks_are_compared_at_first_every_so_many_steps_and_at_the_end_of_an_epoch(every, first_step, looks):
    check = check_of(every=every, first_step=first_step)
    found = []
    check.look = found.append
    for number in range(first_step + 1, 51):
        check.after_step(
            StepEnd(
                number=number, epoch=0, place=number - 1, first=number == 1, ends_epoch=number == 50, last=number == 50
            )
        )
    assert found == [f"step {number}" for number in looks]


def test_a_step_is_compared_before_it_is_saved_unless_it_was():
    check, found = check_of(every=20), []
    check.look = found.append

    def save(number, *, ends=False, callbacks=False):
        step = StepEnd(number=number, epoch=0, place=number - 1, first=False, ends_epoch=ends, last=False)
        check.after_step(step)
        check.before_save(step, callbacks=callbacks)
        taken, found[:] = list(found), []
        return taken

    assert save(20) == ["step 20"]
    assert save(21) == ["step 21"]
    assert save(30, ends=True) == ["step 30"]
    assert save(40, ends=True, callbacks=True) == ["step 40"] * 2, "callbacks of its end come after the first"
    never = check_of(every=0)
    never.look = found.append
    never.before_save(StepEnd(number=3, epoch=0, place=2, first=False, ends_epoch=False, last=False), callbacks=True)
    assert not found


@pytest.mark.parametrize(
    ("size", "drifted", "named"),
    [
        (2, [1], "on rank 1 other values than on rank 0 of kernel."),
        (4, [2], "on rank 2 other values than on rank 0 of kernel."),
        (4, [0], "on rank 0 other values than on rank 1 of kernel."),
        (5, [0, 3], "on ranks 0, 3 other values than on rank 1 of kernel."),
        (4, [2, 3], "on ranks 2, 3 other values than on rank 0 of kernel."),
        (
            30,
            range(10, 20),
            "on ranks 10, 11, 12, 13, 14, 15, 16, 17 and 2 more other values than on rank 0 of kernel.",
        ),
    ],
)
def test_the_ranks_in_the_minority_are_named(size, drifted, named):
    with pytest.raises(DesyncError) as raised:
        check_of(size, drifted).look("step 7")
    assert named in on_command_line(raised.value.message)
    assert on_command_line(raised.value.message).startswith(
        "After step 7 every rank must hold the same weights and optimizer state."
    )


def test_a_rate_that_a_callback_set_is_named():
    with pytest.raises(DesyncError, match=r"of optimizer/learning_rate\. A callback that sets .* set it alike\.$"):
        check_of(drifted=[2], path="optimizer/learning_rate").look("step 7")


def test_other_numbers_of_threads_are_named_as_a_cause():
    with pytest.raises(DesyncError) as raised:
        check_of(drifted=[2], threads=[8, 2, 2, 16]).look("step 7")
    assert "rank 1 computes with 2 threads and rank 3 with 16, and an optimizer that" in on_command_line(
        raised.value.message
    )
    assert "needs --threads the same on all" in on_command_line(raised.value.message)
    assert "memory" not in on_command_line(raised.value.message)


def test_gradients_that_lie_apart_are_named():
    apart = {"one/gamma": 0.02, "two/beta": 0.5, "three/bias": 0.01, "four/bias": 0.001}
    with pytest.raises(DesyncError) as raised:
        check_of(apart=apart).look("step 7")
    assert on_command_line(raised.value.message).startswith(
        "After step 7 ranks that hold slices of the same layers (tp in --parallel)"
    )
    assert (
        "gradients that differ by 50.0% of the norm of all of them, of two/beta, one/gamma, three/bias and 1 more."
        in on_command_line(raised.value.message)
    )


def test_both_hashes_notice_every_bit():
    """On the host and by TensorFlow's operations, as on a GPU."""
    variables = [tf.Variable(value) for value in VALUES.values()]
    hashes = TensorHashes()
    for hashed in (hashes, hashes.on_device):
        before = hashed(variables)
        assert before.shape == (len(variables),)
        np.testing.assert_array_equal(hashed([tf.Variable(value) for value in VALUES.values()]), before)
        for place, (name, value) in enumerate(VALUES.items()):
            octets = np.frombuffer(np.asarray(value).tobytes(), np.uint8)
            for bit in range(0, 8 * octets.size, 3):
                changed = octets.copy()
                changed[bit // 8] ^= 1 if name == "mask" else 1 << bit % 8
                # In place: a copy by way of NumPy could quiet a signalling NaN.
                bits = tf.constant(changed)
                other = tf.Variable(_as(bits, value))
                after = hashed([*variables[:place], other, *variables[place + 1 :]])
                assert (after != before).tolist() == [each == place for each in range(len(variables))], (name, bit)


def _as(octets, value):
    if value.dtype == tf.bool:
        return tf.cast(octets, tf.bool)
    return tf.reshape(tf.bitcast(tf.reshape(octets, [-1, value.dtype.size]), value.dtype), value.shape)


def test_one_process_is_told_that_the_option_does_nothing(session, capsys):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    x = np.ones((8, 2), "float32")
    for options, notes in (({}, 0), ({"desync_every": 7}, 1)):
        hvdtrain.Trainer(model, "sgd", "mse", **options).fit((x, x[:, :1]), batch=8, epochs=1)
        said = "note: without several processes desync_every has no effect."
        assert capsys.readouterr().out.count(said) == notes
