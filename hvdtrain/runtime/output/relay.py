"""A process beside a rank that copies what the rank writes: to where it went before, and to a file.

It is another process so that nothing is lost where the rank is killed, and so that the rank never waits for itself:
C code may fill a pipe while it holds Python's lock. It is run by its path and imports as little as it can.

Usage: python relay.py FILE READ:WRITE ... with numbers of open file descriptors
"""

import contextlib
import os
import signal
import sys
import threading

CHUNK = 65536


def main(words: list[str]) -> None:
    """Copy until nobody can write to any of the streams."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    log = os.open(words[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    pairs = [tuple(map(int, pair.split(":"))) for pair in words[1:]]
    threads = [threading.Thread(target=copy, args=(source, target, log)) for source, target in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def copy(source: int, target: int, log: int) -> None:
    """Copy one stream. Where nobody reads it any more, the rank is to notice as it would without a relay."""
    while True:
        try:
            data = os.read(source, CHUNK)
        except OSError:  # the other end of a terminal was closed
            return
        if not data:
            return
        with contextlib.suppress(OSError):  # no room on the disk
            write_all(log, data)
        try:
            write_all(target, data)
        except OSError:
            os.close(source)
            return


def write_all(descriptor: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(descriptor, data) :]


if __name__ == "__main__":
    main(sys.argv[1:])
