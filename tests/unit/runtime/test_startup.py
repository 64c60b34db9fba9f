"""How TensorFlow starts in a process of hvdtrain."""

import os
import subprocess
import sys

import pytest

from hvdtrain.runtime.startup import _without_noise

CHATTER = """\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1795362227.735116    6630 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1795362227.735479    6630 cudart_stub.cc:31] Could not find cuda drivers on your machine
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild TensorFlow
2026-11-22 10:00:00.123456: I tensorflow/core/platform/cpu_feature_guard.cc:210] This TensorFlow binary is optimized
"""
NO_DRIVER = "E0000 00:00:1795362314.804999    7452 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error\n"
SERIOUS = """\
W0000 00:00:1795362227.735479    6630 cpu_allocator_impl.cc:84] Allocation of 4000000000 exceeds 10% of memory.
E0000 00:00:1795362227.735479    6630 gpu_device.cc:2342] Cannot dlopen some GPU libraries.
Intel MKL ERROR: no such instruction
UserWarning: a package is old
"""


def speak(capfd, level, monkeypatch, error=None, text=CHATTER + SERIOUS):
    """Write to descriptor 2 within the body, and return what reached it."""
    if level is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with _without_noise():
        os.write(2, text.encode())
        if error:
            raise error
    return capfd.readouterr().err


@pytest.mark.parametrize("level", [None, "1", "2", "3"])
def test_chatter_is_hidden_and_nothing_else_is(capfd, monkeypatch, level):
    assert speak(capfd, level, monkeypatch) == SERIOUS
    os.write(2, CHATTER.encode())
    assert capfd.readouterr().err == CHATTER, "later lines are not"


@pytest.mark.parametrize(("gpu", "shown"), [(False, ""), (True, NO_DRIVER)])
def test_a_driver_that_does_not_start_is_told_where_there_is_a_gpu(capfd, monkeypatch, gpu, shown):
    monkeypatch.setattr("hvdtrain.runtime.startup.Path.exists", lambda path: gpu)
    assert speak(capfd, None, monkeypatch, text=NO_DRIVER) == shown


def test_who_asks_for_it_gets_it(capfd, monkeypatch):
    assert speak(capfd, "0", monkeypatch) == CHATTER + SERIOUS


def test_an_error_brings_out_what_was_said_before_it(capfd, monkeypatch):
    with pytest.raises(ImportError):
        speak(capfd, None, monkeypatch, ImportError("no such symbol"))
    assert capfd.readouterr().err == CHATTER + SERIOUS


def script(code, **environ):
    """What a script writes to standard error, and what it prints."""
    environ = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"} | environ
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environ, check=True)
    return done.stderr, done.stdout


def test_a_script_starts_in_silence_and_its_threads_can_still_be_set():
    code = "import hvdtrain; hvdtrain.init(threads=1); import gc, keras, tensorflow as tf; "
    code += "print(tf.config.threading.get_intra_op_parallelism_threads(), gc.isenabled(), gc.get_freeze_count() > 1e5)"
    assert script(code) == ("", "1 True True\n")


@pytest.mark.extended  # it starts TensorFlow
def test_a_run_without_standard_error_starts_too():
    code = "import os, sys; os.close(2); sys.stderr = None; import hvdtrain; import tensorflow as tf; "
    assert script(code + "print(tf.ones(1).numpy())")[1] == "[1.]\n"
