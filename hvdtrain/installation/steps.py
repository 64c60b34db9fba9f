"""Installation steps, pip's among them: announced, timed, logged, and killed with their children."""

import hashlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.config.errors import SetupError
from hvdtrain.runtime.diagnosis.machine import kill_tree
from hvdtrain.runtime.python_environment import PythonEnvironment


def short_hash(content: bytes) -> str:
    """Return twelve hexadecimal digits that identify `content`."""
    return hashlib.sha256(content).hexdigest()[:12]


def output_of(command: Sequence[str], **environ: str) -> bytes:
    """Return a command's output, whatever its exit code; empty if it does not exist."""
    try:
        return subprocess.run(
            command,
            env=os.environ | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        ).stdout
    except OSError:
        return b""


_CAUSE = re.compile(r"CMake Error|fatal error|[Ee]rror: |ERROR: ")
"""Prefixes of compiler and pip output lines that hold the cause."""

SHORT = 20
"""Lines of output shown in full."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"setup: {text}", flush=True)


def install_with(apt: str, dnf: str) -> str:
    """Return this machine's install command, for apt and dnf package names."""
    if shutil.which("apt-get"):
        return f"sudo apt-get install {apt}"
    if shutil.which("dnf"):
        return f"sudo dnf install {dnf}"
    return f"install {apt} with your system's package manager"


class Steps:
    """Runs commands, each with its own log file."""

    def __init__(self, logs: Path):
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def run(self, what: str, command: Sequence[str], *, log: str, failure: str, environ: Mapping[str, str]) -> None:
        """Announce and run `command`; raise SetupError with relevant output and `failure` if it fails."""
        say(what)
        begin = time.monotonic()
        path = self._logs / log
        with path.open("wb") as file:
            process = subprocess.Popen(
                command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, process_group=0
            )
            try:
                code = process.wait()
            except BaseException:  # an interruption ends the command with its children
                kill_tree(process.pid)
                process.wait()
                raise
        if code != 0:
            raise SetupError(f"{failure} (the whole output: {path}):\n{excerpt(path.read_text(errors='replace'))}")
        say(f"  done in {time.monotonic() - begin:.0f} s")


def excerpt(output: str) -> str:
    """Return an output's first errors with context, and its end."""
    lines = output.splitlines()
    if len(lines) <= SHORT:
        return output.rstrip()
    hits = (number for number, line in enumerate(lines) if _CAUSE.search(line))
    near = dict.fromkeys(line for hit in hits for line in range(hit, min(hit + 5, len(lines))))
    causes = [lines[number] for number in list(near)[:20]]
    return "\n".join([*causes, "... the last lines:", *lines[-10:]])


_OFFLINE = "; without a network, PIP_FIND_LINKS may name a folder with the packages"


class Pip:
    """Installs packages, and repeats an interrupted installation."""

    def __init__(self, environment: PythonEnvironment, steps: Steps, work: Path):
        self._environment, self._steps, self._work = environment, steps, work
        self._installing = environment.notes / "installing-packages"
        # The user's own settings of pip stay in force, but for --user, which a venv refuses.
        self._environ = os.environ | {"PIP_USER": "0", "TMPDIR": str(work)}

    def command(self, verb: str, *words: str) -> list[str]:
        """Return a pip command line."""
        return [str(self._environment.python), "-m", "pip", verb, "--disable-pip-version-check", *words]

    @property
    def was_interrupted(self) -> bool:
        """Whether an earlier installation was interrupted: partial packages may look installed."""
        return self._installing.exists()

    def install(self, requirements: Sequence[str], *, what: str) -> None:
        """Install packages and their dependencies into the environment."""
        again = ["--force-reinstall"] if self.was_interrupted else []
        self._installing.touch()
        self._install([*again, *requirements], what)
        self._installing.unlink()

    def install_wheel(self, wheel: Path, *, what: str) -> None:
        """Install a wheel over any version, without an index."""
        self._install(["--no-deps", "--no-index", "--force-reinstall", str(wheel)], what)

    def install_into(self, folder: Path, requirements: Sequence[str], *, what: str) -> None:
        """Install packages into a separate folder, without dependencies."""
        self._install(["--no-deps", "--only-binary", ":all:", "--target", str(folder), *requirements], what)

    def fetch_sources(
        self, package: str, version: str, *, sha256: str, folder: Path, environ: Mapping[str, str]
    ) -> Path:
        """Download a release's source distribution and return its file.

        pip verifies the hash before it runs any code.
        """
        needs = self._work / "sources.txt"
        needs.write_text(f"{package}=={version} --hash=sha256:{sha256}\n")
        words = ("--no-deps", "--no-binary", package, "--no-build-isolation", "--no-cache-dir", "--require-hashes")
        self._run(
            self.command("download", "--progress-bar", "off", *words, "--dest", str(folder), "-r", str(needs)),
            f"fetching the sources of {package} {version}",
            _OFFLINE,
            environ=environ,
        )
        return next(folder.iterdir())

    def _install(self, words: Sequence[str], what: str) -> None:
        self._run(self.command("install", "--progress-bar", "off", *words), f"installing {what}", _OFFLINE)

    def uninstall(self, package: str) -> None:
        """Remove a package from the environment."""
        self._run(self.command("uninstall", "--yes", package), f"removing {package}")

    def _run(
        self, command: list[str], what: str, advice: str = "", *, environ: Mapping[str, str] | None = None
    ) -> None:
        self._steps.run(
            f"{what} (a few seconds)",
            command,
            log="pip.log",
            failure=f"{what} failed{advice}",
            environ=self._environ if environ is None else environ,
        )
