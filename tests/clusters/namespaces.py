"""Several hosts on this machine: network namespaces on one bridge, each with its own name, files, processes and sshd.

    python -m tests.clusters.namespaces 2 --rate 1gbit -- horovodrun --gloo -np 2 -H host1:1,host2:1 python train.py

Everything lives in namespaces that two or more small processes hold open, and these end as soon as nobody holds the
other end of their input: a run that is killed leaves neither hosts nor processes behind, and two runs cannot collide.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

NET = "10.213.78"
"""All runs may use it: each has a bridge of its own, and no address in the network of this machine."""
PROGRAMS = ("unshare", "nsenter", "ip", "sshd", "ssh", "ssh-keygen")
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_FORWARDED = ("PYTHONPATH", "HVDTRAIN_DATA", "TF_USE_LEGACY_KERAS")
_WAIT_S = 20
_HOLD = "echo ready; exec env --ignore-signal=CHLD cat >/dev/null"
"""Ends with its input. Processes that it inherits leave no zombies behind."""
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
_HOLD_AND_RESTORE = """
before=$(cat "$2" 2>/dev/null)
[ "$before" != 1 ] || echo 0 >"$2"
echo ready
cat >/dev/null
rm -rf "$1"
[ "$before" != 1 ] || echo 1 >"$2"
"""
"""Has the kernel share out its cores by processes meanwhile, and not by sessions first, of which each host has its own:
with Linux 6.18.44 a rank that waits in MPI then kept the others of its core, and the kernel's own threads there, from
running at all, and one in ten jobs of two hosts with two ranks stood still. Nothing is left of a run that is killed."""
_SET_UP = """
set -e
hostname "$1"
mount --bind "$2/disks/$1" "$2/home"
for file in hosts passwd shadow; do mount --bind "$2/etc/$file" "/etc/$file"; done
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs -o mode=755 tmpfs /run/sshd
ip link set lo up
"""
_SSHD = """
HostKey {folder}/etc/hostkey
AuthorizedKeysFile {folder}/etc/user.pub
StrictModes no
PermitRootLogin yes
PasswordAuthentication no
UsePAM no
PidFile none
MaxStartups 100
SetEnv {variables}
"""


class NoHosts(Exception):
    """This machine or this user cannot make hosts; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """Hosts named `host1`, `host2` …, which see one another by these names; see `hosts`."""

    folder: Path
    switch: int
    """The process that holds the bridge's network."""
    holders: tuple[int, ...]
    """The process that holds each host's namespaces."""

    @property
    def home(self) -> Path:
        """The home and working folder of each host, at the same path on all of them, with different files."""
        return self.folder / "home"

    def disk(self, number: int) -> Path:
        """Return where this machine sees the files that host `number` has in its home."""
        return self.folder / "disks" / name(number)

    def words(self, number: int, command: Sequence[str]) -> list[str]:
        """Return the words that run `command` on host `number`, in its home."""
        spaces = [f"--{kind}=/proc/{self.holders[number - 1]}/ns/{file}" for kind, file in _NAMESPACES.items()]
        return ["nsenter", *spaces, "env", f"--chdir={self.home}", *command]

    def environ(self, **extra: str) -> dict[str, str]:
        """Return the environment of somebody who has logged in and activated this Python's environment."""
        own = {"HOME": str(self.home), "TMPDIR": str(self.home / "tmp"), "USER": "root", "LANG": "C.UTF-8"}
        path = f"{Path(sys.executable).parent}:{_SYSTEM_PATH}"
        root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        given = {key: os.environ[key] for key in _FORWARDED if key in os.environ}
        return {**own, "PATH": path, **root, **given, **extra}

    def start(self, number: int, command: Sequence[str], **environ: str) -> subprocess.Popen[str]:
        """Start `command` on host `number` in a process group of its own, with its output in pipes."""
        return subprocess.Popen(
            self.words(number, command),
            env=self.environ(**environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def exec(
        self, number: int, command: Sequence[str], *, timeout: float = 60, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on host `number` to its end.

        Raises:
            subprocess.TimeoutExpired: it did not end; its process group was killed.
        """
        process = self.start(number, command, **environ)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired as late:
            os.killpg(process.pid, signal.SIGKILL)
            late.stdout, late.stderr = process.communicate()
            raise
        return subprocess.CompletedProcess(list(command), process.returncode, out, err)

    def cut(self, number: int) -> None:
        """Unplug the cable of host `number`."""
        self._of_switch("ip", "link", "set", _port(number), "down")

    def heal(self, number: int) -> None:
        """Plug it in again."""
        self._of_switch("ip", "link", "set", _port(number), "up")

    def shape(self, rate: str | None, *, burst: str = "512kb", latency: str = "50ms") -> None:
        """Let each cable carry so much in each direction, such as `1gbit`; None takes the limit away."""
        for number in range(1, len(self.holders) + 1):
            for run, device in ((self._of_switch, _port(number)), (self._of_host(number), "eth0")):
                if rate is None:
                    run("sh", "-c", f"tc qdisc del dev {device} root 2>/dev/null || true")
                else:
                    limit = ("rate", rate, "burst", burst, "latency", latency)
                    run("tc", "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def processes(self, number: int) -> list[str]:
        """Return the command lines of the processes on host `number`, but for sshd's."""
        shown = self.exec(number, ["ps", "-eo", "args", "--no-headers"]).stdout.splitlines()
        return [line for line in shown if not line.startswith(("cat", "sshd:", "ps -eo"))]

    def kill(self, number: int) -> None:
        """Kill all processes of host `number`, sshd's too, and start sshd anew."""
        self.exec(number, ["sh", "-c", "kill -9 -1"])
        self.start_sshd(number)

    def start_sshd(self, number: int) -> None:
        """Have host `number` listen on port 22 of all its addresses."""
        sshd = shutil.which("sshd", path=_SYSTEM_PATH)
        self._of_host(number)(str(sshd), "-f", str(self.folder / "etc" / "sshd.conf"))

    def _of_switch(self, *command: str) -> None:
        _run(["nsenter", f"--net=/proc/{self.switch}/ns/net", *command])

    def _of_host(self, number: int):
        return lambda *command: _run(self.words(number, command))


_NAMESPACES = {"mount": "mnt", "uts": "uts", "ipc": "ipc", "net": "net", "pid": "pid_for_children"}


def name(number: int) -> str:
    """Return the host name of host `number`, which counts from 1."""
    return f"host{number}"


def address(number: int) -> str:
    """Return the address of host `number`."""
    return f"{NET}.{number}"


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """Context with `count` hosts, which end with all their processes where it is left.

    Raises:
        NoHosts: it takes the rights of root, a program is missing, or the kernel refuses.
    """
    _need_means()
    folder = Path(tempfile.mkdtemp(prefix="hosts-", dir="/tmp"))  # short: Unix sockets are made in it
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        _write_files(folder, count)
        switch = stack.enter_context(
            _held(["unshare", "--net", "sh", "-c", _HOLD_AND_RESTORE, "sh", str(folder), str(AUTOGROUP)])
        )
        holders = [stack.enter_context(_host(folder, number)) for number in range(1, count + 1)]
        found = Hosts(folder, switch, tuple(holders))
        _join(found)
        yield found


def why_not() -> str | None:
    """Return why this machine cannot make hosts; None if it can."""
    try:
        with hosts(1):
            return None
    except NoHosts as why:
        return str(why)


def _need_means() -> None:
    if os.geteuid():
        raise NoHosts("network namespaces with an sshd take the rights of root")
    missing = [program for program in PROGRAMS if shutil.which(program, path=_SYSTEM_PATH) is None]
    if missing:
        raise NoHosts(f"{', '.join(missing)}: not installed (packages openssh-server, iproute2 and util-linux)")
    Path("/run/sshd").mkdir(exist_ok=True)


def _write_files(folder: Path, count: int) -> None:
    """Write what all hosts read, and what each has in its home: keys and addresses, so that ssh asks for nothing."""
    numbers = range(1, count + 1)
    for each in ("home", "etc", *(f"disks/{name(number)}/{sub}" for number in numbers for sub in (".ssh", "tmp"))):
        (folder / each).mkdir(parents=True)
    etc, home = folder / "etc", folder / "home"
    for key in ("hostkey", "user"):
        _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(etc / key)])
    lines = [f"{address(number)} {name(number)}" for number in numbers]
    (etc / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
    (etc / "passwd").write_text(f"root:x:0:0:root:{home}:/bin/sh\n{_others('/etc/passwd')}")
    (etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")
    (etc / "shadow").chmod(0o600)
    variables = {key: os.environ[key] for key in _FORWARDED if key in os.environ}
    settings = " ".join(f'{key}="{value}"' for key, value in {"TMPDIR": str(home / "tmp"), **variables}.items())
    (etc / "sshd.conf").write_text(_SSHD.format(folder=folder, variables=settings))
    known = (etc / "hostkey.pub").read_text()
    for number in numbers:
        ssh = folder / "disks" / name(number) / ".ssh"
        (ssh / "config").write_text(f"IdentityFile {etc}/user\nLogLevel ERROR\n")
        (ssh / "known_hosts").write_text("".join(f"{line.replace(' ', ',')} {known}" for line in lines))


def _others(passwd: str) -> str:
    return "".join(line for line in Path(passwd).read_text().splitlines(keepends=True) if not line.startswith("root:"))


def _host(folder: Path, number: int) -> contextlib.AbstractContextManager[int]:
    kinds = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--mount-proc"]
    return _held(["unshare", *kinds, "sh", "-c", _SET_UP + _HOLD, "sh", name(number), str(folder)])


@contextlib.contextmanager
def _held(command: Sequence[str]) -> Iterator[int]:
    """Context in which `command` holds its namespaces open; yields its process id."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    holder = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    assert holder.stdin is not None
    assert holder.stdout is not None
    assert holder.stderr is not None
    try:
        if holder.stdout.readline() != "ready\n":
            raise NoHosts(f"`{' '.join(command[:8])} …` failed: {holder.stderr.read().strip()}")
        yield holder.pid
    finally:
        holder.stdin.close()
        holder.wait(_WAIT_S)


def _join(found: Hosts) -> None:
    """Plug the hosts into the bridge."""
    switch = ["nsenter", f"--net=/proc/{found.switch}/ns/net", "ip", "link"]
    _run([*switch, "add", "bridge", "type", "bridge"])
    _run([*switch, "set", "bridge", "up"])
    for number, holder in enumerate(found.holders, 1):
        _run([*switch, "add", _port(number), "type", "veth", "peer", "name", "eth0", "netns", str(holder)])
        _run([*switch, "set", _port(number), "master", "bridge", "up"])
        inside = ["nsenter", f"--net=/proc/{holder}/ns/net", "ip"]
        _run([*inside, "addr", "add", f"{address(number)}/24", "dev", "eth0"])
        _run([*inside, "link", "set", "eth0", "up"])
        found.start_sshd(number)


def _port(number: int) -> str:
    return f"port{number}"


def _run(command: Sequence[str]) -> None:
    """Run a command of the system's.

    Raises:
        NoHosts: it is not there, or fails.
    """
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, env={"PATH": _SYSTEM_PATH})
    except FileNotFoundError:
        raise NoHosts(f"there is no {command[0]!r}") from None
    if done.returncode:
        raise NoHosts(f"`{' '.join(command)}` failed: {done.stderr.strip()}")


def main() -> int:
    """Run a command on the first of several hosts, and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clusters.namespaces", description=main.__doc__)
    parser.add_argument("count", type=int, help="how many hosts")
    parser.add_argument("--rate", help="what each cable carries in each direction, such as 1gbit")
    parser.add_argument("command", nargs="+", help="run on host1, in its home")
    given = parser.parse_args()
    with hosts(given.count) as found:
        if given.rate:
            found.shape(given.rate)
        return subprocess.run(found.words(1, given.command), check=False, env=found.environ()).returncode


if __name__ == "__main__":
    sys.exit(main())
