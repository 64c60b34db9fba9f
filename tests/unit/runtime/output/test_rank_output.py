"""What a rank writes to its standard streams is kept in a file, and shown as before."""

import fcntl
import os
import pty
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from hvdtrain.runtime.control.channel import let_readers_finish
from hvdtrain.runtime.output.fetching import LogFetcher, Tail

RANK = """
    import os, sys, warnings
    from pathlib import Path
    from hvdtrain.runtime.output.rank_output import RankOutput

    output = RankOutput()
    output.start(Path(sys.argv[1]), "rank 0 of 1")
    print("printed")
    print("warned", file=sys.stderr)
    os.write(1, b"native\\n")
    os.system("echo from a child")
    {end}
"""


def run(tmp_path, end, **options):
    file = tmp_path / "logs" / "rank-0.log"
    code = textwrap.dedent(RANK).format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=60, check=False, **options
    )
    deadline = time.monotonic() + 5
    while b"from a child" not in file.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done, file.read_text()


def test_both_streams_and_children_are_kept_and_shown(tmp_path):
    done, log = run(tmp_path, "output.close(); print('after')")
    assert sorted(done.stdout.splitlines()) == ["after", "from a child", "native", "printed"]
    assert done.stderr == "warned\n"
    heading, *lines = log.splitlines()
    assert heading.startswith("---- ")
    assert heading.endswith(" rank 0 of 1")
    assert sorted(lines) == ["from a child", "native", "printed", "warned"]


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("sys.stdout.flush(); os.kill(os.getpid(), 9)", -9),
        ("sys.stdout.flush(); os.abort()", -6),
        ("from hvdtrain.runtime.control.channel import end_process; end_process(3)", 3),
        ("raise RuntimeError('the traceback')", 1),
    ],
)
def test_a_rank_that_ends_otherwise_loses_nothing_that_it_wrote(tmp_path, end, code):
    done, log = run(tmp_path, end)
    assert done.returncode == code
    for text in (done.stdout, log):
        assert {"printed", "native", "from a child"} <= set(text.splitlines())
    assert ("the traceback" in log) == (code == 1)


def test_a_second_start_appends_or_changes_the_file(tmp_path):
    done, log = run(
        tmp_path,
        "output.start(Path(sys.argv[1]), 'world 2'); print('two', flush=True);"
        "output.start(Path(sys.argv[1]).with_name('rank-7.log'), 'world 3'); print('three', flush=True);"
        "output.close()",
    )
    assert [line[25:] for line in log.splitlines() if line.startswith("----")] == ["rank 0 of 1", "world 2"]
    assert "two" in log
    assert "three" not in log
    assert (tmp_path / "logs" / "rank-7.log").read_text().splitlines()[1:] == ["three"]
    assert done.stdout.splitlines()[-2:] == ["two", "three"]


def test_signals_for_the_rank_do_not_end_the_copy(tmp_path):
    end = "import signal; signal.signal(2, lambda *_: print('saved', flush=True)); os.killpg(0, 2)"
    end += "; output.close()"
    done, log = run(tmp_path, end, start_new_session=True)
    assert done.returncode == 0
    assert "saved" in log
    assert "saved" in done.stdout


def test_a_rank_whose_reader_is_gone_notices(tmp_path):
    end = "while True: os.write(1, b'x' * 1000)"
    code = textwrap.dedent(RANK).format(end=end)
    command = [sys.executable, "-c", code, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        process.stdout.close()
        assert "BrokenPipeError" in process.stderr.read()
        assert process.wait(30) in (1, 120), "120 is Python's, where what it still had to write cannot be written"


def test_a_terminal_stays_one(tmp_path):
    code = textwrap.dedent(RANK).format(
        end="print(sys.stdout.isatty(), os.isatty(2), os.get_terminal_size(1).columns, flush=True); output.close()"
    )
    main, side = pty.openpty()
    process = subprocess.Popen(
        ["sh", "-c", 'stty cols 77; exec "$@"', "sh", sys.executable, "-c", code, str(tmp_path / "log")],
        stdin=side,
        stdout=side,
        stderr=side,
    )
    os.close(side)
    shown = b""
    while b"True True 77" not in shown:
        shown += os.read(main, 1000)
    assert process.wait(30) == 0
    assert b"native" in shown
    assert "True True 77" in (tmp_path / "log").read_text()
    os.close(main)


def test_an_end_waits_for_its_readers_and_not_for_ever(monkeypatch):
    read, write = os.pipe()
    monkeypatch.setattr(os, "fstat", lambda number, fstat=os.fstat: fstat(write))
    monkeypatch.setattr(fcntl, "ioctl", lambda number, *rest, ioctl=fcntl.ioctl: ioctl(write, *rest))
    os.write(write, b"text")
    begin = time.monotonic()
    let_readers_finish(0.3)
    assert 0.25 < time.monotonic() - begin < 2
    threading.Timer(0.1, lambda: os.read(read, 100)).start()
    begin = time.monotonic()
    let_readers_finish(20)
    assert time.monotonic() - begin < 10


class Board:
    """A status board that two ranks share."""

    def __init__(self):
        self.posts = {}

    def post(self, key, value):
        self.posts[1] = value

    def read(self, key):
        return dict(self.posts)


def test_files_of_other_hosts_are_written_as_they_grow(tmp_path):
    board, there, here = Board(), tmp_path / "there.log", tmp_path / "logs"
    here.mkdir()
    sender, writer = LogFetcher(board, there, None), LogFetcher(board, None, here)
    there.write_text("one\n")
    sender.look(0.0)
    writer.look(0.0)
    assert (here / "rank-1.log").read_text() == "one\n"
    with there.open("a") as stream:
        stream.write("two\n")
    sender.look(5.0)  # not yet
    writer.exchange_tails()
    assert (here / "rank-1.log").read_text() == "one\n"
    sender.look(11.0)
    writer.exchange_tails()
    writer.exchange_tails()
    assert (here / "rank-1.log").read_text() == "one\ntwo\n"


def test_what_is_too_long_is_named_and_another_process_begins_anew(tmp_path):
    board, there, here = Board(), tmp_path / "there.log", tmp_path / "logs"
    here.mkdir()
    sender, writer = LogFetcher(board, there, None), LogFetcher(board, None, here)
    there.write_bytes(b"a" * 40_000)
    sender.exchange_tails()
    writer.exchange_tails()
    text = (here / "rank-1.log").read_text()
    assert text.startswith("\n---- 23616 bytes were not fetched\naaa")
    assert text.count("a") == 16_384
    board.post("log", Tail(-1, 4, b"new\n").encode())
    writer.exchange_tails()
    assert (here / "rank-1.log").read_text().endswith("anew\n")
