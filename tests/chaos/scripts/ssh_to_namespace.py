"""Stands in for ssh between hosts that are network namespaces of one machine.

Like sshd it runs a command apart from who asked for it. Over a link that is down nothing comes back, not even that the
command has ended: lines that are lost so, and exit codes, are left in files.

Usage: ssh_to_namespace.py FOLDER NAMESPACES [option …] ADDRESS command …
"""

import contextlib
import os
import select
import subprocess
import sys
import time
from pathlib import Path

_WITH_VALUE = {"-o", "-p", "-i", "-l", "-F"}
"""Options of ssh that take a value."""
_LOOK_S = 0.5


def main(folder: Path, namespaces: list[str], words: list[str]) -> int:
    """Do what ssh does with these words, and return the exit code of the command."""
    address, command = _split(words)
    number = int(address.rpartition(".")[2]) - 1
    output, give_output = os.pipe()
    code, give_code = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.close(output)
        os.close(code)
        _leave_streams()
        _serve(namespaces[number], folder / f"host{number}", command, give_output, give_code)
        os._exit(0)
    os.close(give_output)
    os.close(give_code)
    while data := os.read(output, 2**16):
        os.write(1, data)
    return int(os.read(code, 16) or b"255")


def _split(words: list[str]) -> tuple[str, str]:
    """Return the address and the command of ssh's arguments; options may stand on both sides of the address."""
    address, *words = _without_options(words)
    return address, " ".join(_without_options(words))


def _without_options(words: list[str]) -> list[str]:
    """Return the words from the first one on that belongs to no option."""
    while words and words[0].startswith("-"):
        words = words[2 if words[0] in _WITH_VALUE else 1 :]
    return words


def _leave_streams() -> None:
    """Hold none of the pipes of who asked, but for the input, in which horovodrun sends the environment."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nothing, stream)


def _serve(namespace: str, host: Path, command: str, output: int, code: int) -> None:
    """Run the command on a host, pass its output on while the link is up, and then its exit code.

    What is written while it is down goes to the file HOST.unheard, the exit code to HOST.code as well.
    """
    named = f'hostname {host.name}; exec sh -c "$1"'
    words = ["ip", "netns", "exec", namespace, "unshare", "--uts", "sh", "-c", named, "_", command]
    job = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.stdout is not None
    with host.with_suffix(".unheard").open("ab") as unheard:
        for line in job.stdout:
            if _is_up(namespace):
                with contextlib.suppress(BrokenPipeError):
                    os.write(output, line)
            else:
                unheard.write(line)
                unheard.flush()
    ended = job.wait()
    host.with_suffix(".code").write_text(str(ended % 256))
    while not _is_up(namespace) and not _is_left(output):
        time.sleep(_LOOK_S)
    with contextlib.suppress(BrokenPipeError):
        os.write(code, str(ended % 256).encode())


def _is_up(namespace: str) -> bool:
    """Tell whether the host's link is up."""
    shown = subprocess.run(["ip", "-n", namespace, "-o", "link", "show", "eth0"], capture_output=True, text=True)
    return "state UP" in shown.stdout


def _is_left(pipe: int) -> bool:
    """Tell whether nobody reads the other end."""
    poll = select.poll()
    poll.register(pipe, 0)
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2].split(","), sys.argv[3:]))
