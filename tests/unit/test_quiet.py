"""What is hidden while TensorFlow starts, and from whom."""

import os

import pytest

from hvdtrain.runtime.quiet import start_up_chatter_hidden


def speak(capfd, level, monkeypatch, error=None):
    """Write to descriptor 2 within the body, and return what reached it."""
    if level is None:
        monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    else:
        monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", level)
    with start_up_chatter_hidden():
        os.write(2, b"chatter\n")
        if error:
            raise error
    return capfd.readouterr().err


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="a GPU's driver is always heard")
@pytest.mark.parametrize("level", [None, "2", "3"])
def test_chatter_is_hidden_and_later_lines_are_not(capfd, monkeypatch, level):
    assert speak(capfd, level, monkeypatch) == ""
    os.write(2, b"later\n")
    assert capfd.readouterr().err == "later\n"


@pytest.mark.parametrize("level", ["0", "1"])
def test_who_asks_for_it_gets_it(capfd, monkeypatch, level):
    assert speak(capfd, level, monkeypatch) == "chatter\n"


def test_an_error_brings_out_what_was_said_before_it(capfd, monkeypatch):
    with pytest.raises(ImportError):
        speak(capfd, None, monkeypatch, ImportError("no such symbol"))
    assert capfd.readouterr().err == "chatter\n"
