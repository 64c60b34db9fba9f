"""Run pip of an environment."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.installation.steps import Steps
from hvdtrain.runtime.python_environment import PythonEnvironment

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
